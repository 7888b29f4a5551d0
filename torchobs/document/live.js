// Keeps the page up to date: takes what has changed from the exporter's stream and puts it in place.
"use strict";
(() => {
  const STALE_MS = 5000, FIRST_WAIT_MS = 1000, LONGEST_WAIT_MS = 10000;
  const link = document.getElementById("link"), pause = document.getElementById("pause");
  let source = null, retry = 0, wait = FIRST_WAIT_MS, heard = Date.now(), paused = false, over = false, words = "";

  // In place, so that focus, selection and scroll positions stay where they are.
  function morph(old, fresh) {
    const news = [...fresh.childNodes];
    news.forEach((node, index) => {
      const known = old.childNodes[index];
      if (!known) old.append(node);
      else if (known.nodeName !== node.nodeName) known.replaceWith(node);
      else if (node.nodeType !== Node.ELEMENT_NODE) { if (known.data !== node.data) known.data = node.data; }
      else if (!known.isEqualNode(node)) { attributes(known, node); morph(known, node); }
    });
    while (old.childNodes.length > news.length) old.lastChild.remove();
  }

  function attributes(old, fresh) {
    for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
    for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }

  function show(parts) {
    for (const [id, html] of Object.entries(parts)) {
      const section = document.getElementById(id), template = document.createElement("template");
      if (id === "title") document.title = html;
      else if (id === "stream") { document.body.dataset.stream = html; later(0); }
      else if (section) { template.innerHTML = html; morph(section, template.content); }
    }
  }

  // The state is said once when it changes; how long it lasts is for the eye only.
  function say(state, text, detail = "") {
    if (link.dataset.state !== state || words !== text) {
      link.dataset.state = state;
      link.replaceChildren(words = text, Object.assign(document.createElement("span"), { ariaHidden: "true" }));
    }
    link.lastChild.textContent = detail && ` ${detail}`;
  }

  function disconnect() {
    clearTimeout(retry);
    if (source) source.close();
    source = null;
  }

  function later(delay) {
    disconnect();
    retry = setTimeout(connect, delay);
  }

  function news(event) {
    heard = Date.now();
    wait = FIRST_WAIT_MS;
    over = false;
    say("live", "Live");
    return JSON.parse(event.data);
  }

  function connect() {
    disconnect();
    if (paused || document.hidden) return;
    source = new EventSource(document.body.dataset.stream);
    source.addEventListener("parts", (event) => show(news(event)));
    source.addEventListener("same", news);
    source.addEventListener("end", (event) => {
      const { gone, full, done } = JSON.parse(event.data);
      if (full) say("still", "Too many are watching; trying again");
      // Nothing is wrong: all ranks have ended, and so has what watched them. What is shown stays; another run may come.
      if (done) { over = true; say("still", "The run has ended and its exporter has left; this is its last state"); }
      else if (gone) say("gone", "The exporter has ended; trying again");
      later(full || done ? LONGEST_WAIT_MS : gone ? FIRST_WAIT_MS : 0);
    });
    source.addEventListener("error", () => {
      if (!over) say("gone", "The exporter does not answer; trying again");
      later(over ? LONGEST_WAIT_MS : wait);
      wait = Math.min(2 * wait, LONGEST_WAIT_MS);
    });
  }

  setInterval(() => {
    const quiet = Date.now() - heard, since = `(last news ${Math.round(quiet / 1000)} s ago)`;
    if (paused || over || document.hidden || quiet < STALE_MS) return;
    if (link.dataset.state === "live") say("gone", "No news from the exporter", since);
    else say(link.dataset.state, words, since);
  }, 1000);

  pause.hidden = false;
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.textContent = paused ? "Resume" : "Pause";
    if (paused) { disconnect(); say("still", "Paused"); } else connect();
  });
  document.addEventListener("visibilitychange", connect);
  say("still", "Connecting");
  connect();
})();
