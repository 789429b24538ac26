// Keeps a page up to date: when the fleet has changed, the page is fetched again, and its live parts are replaced.
"use strict";
(() => {
  const connection = document.getElementById("connection");
  let version = null;
  let busy = false;
  let due = false;

  async function refresh() {
    if (busy) {
      due = true;
      return;
    }
    busy = true;
    try {
      const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
      if (!answer.ok) return;
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      for (const part of document.querySelectorAll("[data-live]")) {
        const next = fresh.getElementById(part.id);
        if (next === null || next.innerHTML === part.innerHTML) continue;
        const focused = part.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
        const region = part.querySelector(".scroll");
        const left = region === null ? 0 : region.scrollLeft;
        part.replaceChildren(...next.childNodes);
        if (focused !== null) {
          const again = [...part.querySelectorAll("a")].find((each) => each.getAttribute("href") === focused);
          if (again) again.focus({ preventScroll: true });
        }
        if (left > 0 && part.querySelector(".scroll") !== null) part.querySelector(".scroll").scrollLeft = left;
      }
    } catch {
      // The stream of updates tells that the coordinator is away.
    } finally {
      busy = false;
      if (due) {
        due = false;
        refresh();
      }
    }
  }

  if (document.querySelector("[data-live]") === null) return;
  const updates = new EventSource("/updates");
  updates.onmessage = (message) => {
    const update = JSON.parse(message.data);
    connection.textContent = "live";
    connection.className = "connection live";
    if (version !== null && update.version !== version) refresh();
    version = update.version;
    document.dispatchEvent(new CustomEvent("watts", { detail: update.watts }));
  };
  updates.onerror = () => {
    connection.textContent = "The coordinator does not answer; trying again";
    connection.className = "connection away";
  };
})();
