// Keeps a page up to date: when the fleet has changed, the page is fetched again, and its live parts are replaced.
"use strict";
(() => {
  const RETRY_MS = 10_000;
  const supply = document.getElementById("watts")?.dataset.supply;
  const UPDATES = supply === undefined ? "/updates" : `/updates?${new URLSearchParams({ supply })}`;
  const connection = document.getElementById("connection");
  let version = null;
  let problem = null;
  let busy = false;
  let due = false;

  function show(text, kind) {
    connection.textContent = text;
    connection.className = `connection ${kind}`;
  }

  // What a link, a summary or a scrolled region is called, before and after the page was brought up to date.
  function nameOf(element) {
    return element.getAttribute("href") ?? element.getAttribute("aria-label") ?? element.textContent;
  }

  // The controls with a name, in order: two links may lead to the same page.
  function namesakes(part, name) {
    return [...part.querySelectorAll("a, summary, [tabindex]")].filter((each) => nameOf(each) === name);
  }

  async function refresh() {
    if (busy) {
      due = true;
      return;
    }
    busy = true;
    try {
      const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (!answer.ok) {
        const told = fresh.querySelector("[role=alert]");
        problem = told === null ? `the answer was ${answer.status}` : told.textContent;
        show(`Not up to date: ${problem}`, "away");
        return;
      }
      problem = null;
      for (const part of document.querySelectorAll("[data-live]")) {
        const next = fresh.getElementById(part.id);
        if (next === null || next.innerHTML === part.innerHTML) continue;
        const focused = part.contains(document.activeElement) ? nameOf(document.activeElement) : null;
        const rank = focused === null ? 0 : namesakes(part, focused).indexOf(document.activeElement);
        const scrolled = [...part.querySelectorAll(".scroll, .drawing")].map((each) => each.scrollLeft);
        for (const open of part.querySelectorAll("details[open]")) {
          const again = next.querySelector(`#${open.id}`);
          if (again !== null) again.open = true;
        }
        part.replaceChildren(...next.childNodes);
        if (focused !== null) {
          const found = namesakes(part, focused);
          (found[rank] ?? found[0])?.focus({ preventScroll: true });
        }
        part.querySelectorAll(".scroll, .drawing").forEach((each, k) => (each.scrollLeft = scrolled[k] ?? 0));
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

  // Why the coordinator refuses the updates, which an EventSource does not tell; null if it does not refuse them now.
  async function refusal() {
    try {
      const answer = await fetch(UPDATES);
      if (answer.ok) {
        await answer.body.cancel();
        return null;
      }
      const isJson = answer.headers.get("Content-Type") === "application/json";
      const text = isJson ? (await answer.json()).detail : `the answer was ${answer.status}`;
      return { text, final: answer.status === 403 };
    } catch {
      return { text: "the coordinator does not answer", final: false };
    }
  }

  async function afterRefusal() {
    const refused = await refusal();
    if (refused !== null) {
      show(`Not up to date: ${refused.text}`, "away");
      if (refused.final) return;
    }
    refresh();
    setTimeout(follow, RETRY_MS);
  }

  function follow() {
    const updates = new EventSource(UPDATES);
    let wasTold = false;
    updates.onmessage = (message) => {
      const update = JSON.parse(message.data);
      wasTold = false;
      if (problem === null && connection.textContent !== "live") show("live", "live");
      if (problem !== null || (version !== null && update.version !== version)) refresh();
      version = update.version;
      document.dispatchEvent(new CustomEvent("watts", { detail: update.watts }));
    };
    updates.addEventListener("failure", (message) => {
      const failure = JSON.parse(message.data);
      show(`Not up to date: ${failure.text}`, "away");
      wasTold = true;
      if (failure.final) updates.close(); // another request would be refused, too
    });
    updates.onerror = () => {
      if (updates.readyState === EventSource.CLOSED) {
        afterRefusal();
      } else if (wasTold) {
        wasTold = false; // the stream ended for the reason that is shown; the next error is of the new request
      } else {
        show("The coordinator does not answer; trying again", "away");
      }
    };
  }

  if (document.querySelector("[data-live]") !== null) follow();
})();
