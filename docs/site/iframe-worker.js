// The theme searches in a worker, which a page that was opened as a file may not start. There, run it in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.title = "Search";
      document.body.append(frame);
      const page = frame.contentDocument;
      page.open();
      page.write("<!doctype html><title>Search</title><body>");
      page.close();
      const inside = frame.contentWindow;
      // What the worker posts is for this page, and not for its own frame.
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = page.createElement("script");
      const loaded = new Promise((resolve) => script.addEventListener("load", resolve));
      script.src = url;
      page.body.append(script);
      this.postMessage = async (data) => {
        await loaded;
        inside.dispatchEvent(new inside.MessageEvent("message", { data }));
      };
    }
  };
}
