// The search runs in a worker, and a page that is opened as a file may start none: it gets a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      const frame = (this.frame = document.createElement("iframe"));
      frame.hidden = true;
      this.loaded = new Promise((done, failed) => {
        frame.onload = () => {
          const inner = frame.contentWindow;
          inner.postMessage = (data) => this.pass(data, this);
          const script = inner.document.createElement("script");
          Object.assign(script, { src: url, onload: () => done(inner), onerror: failed });
          inner.document.body.append(script);
        };
      });
      this.loaded.catch((event) => this.onerror && this.onerror(event));
      document.body.append(frame);
    }
    postMessage(data) {
      this.loaded.then((inner) => this.pass(data, inner));
    }
    // As between a page and a worker: later, and a copy.
    pass(data, receiver) {
      const copy = structuredClone(data);
      setTimeout(() => receiver.onmessage && receiver.onmessage({ data: copy }));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
