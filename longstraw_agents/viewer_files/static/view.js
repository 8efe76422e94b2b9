// What pages do beyond being read: follow a run, obey a few keys, and go on with a search. Without it every page works.
"use strict";

const EVERY = 2000; // milliseconds between looks at whether something changed
const status = document.getElementById("status");
const switches = { live: document.getElementById("live"), keys: document.getElementById("keys") };
document.querySelector(".switches").hidden = false;

for (const [name, button] of Object.entries(switches)) {
  if (localStorage.getItem(name) === "off") button.setAttribute("aria-pressed", "false");
  button.addEventListener("click", () => {
    const on = !isOn(name);
    button.setAttribute("aria-pressed", String(on));
    localStorage.setItem(name, on ? "on" : "off");
  });
}

function isOn(name) {
  return switches[name].getAttribute("aria-pressed") === "true";
}

async function page(address) {
  const answer = await fetch(address);
  if (!answer.ok) throw new Error(`the viewer answers ${answer.status}`);
  return new DOMParser().parseFromString(await answer.text(), "text/html");
}

// Live: the main part is replaced when the page's stamp changes; what was open, chosen and focused stays so.
async function follow(of) {
  let stamp = null;
  for (;;) {
    await new Promise((done) => setTimeout(done, stamp === null ? 0 : EVERY));
    if (document.hidden || !isOn("live")) continue;
    try {
      const now = (await (await fetch(`/state?of=${encodeURIComponent(of)}`)).json()).stamp;
      if (stamp !== null && now !== stamp) replaceMain(await page(location.href));
      stamp = now;
    } catch (error) {
      stamp = stamp ?? "";
      status.textContent = `not up to date: ${error.message}`;
    }
  }
}

function replaceMain(fresh) {
  const main = document.getElementById("main");
  const focused = document.activeElement && document.activeElement.id;
  const inside = main.contains(document.activeElement);
  const next = document.adoptNode(fresh.getElementById("main"));
  for (const details of main.querySelectorAll("details[id]")) {
    const same = next.querySelector(`details[id="${CSS.escape(details.id)}"]`);
    if (same) same.open = details.open;
  }
  for (const box of main.querySelectorAll("input:checked")) {
    const same = next.querySelector(`input[value="${CSS.escape(box.value)}"]`);
    if (same) same.checked = true;
  }
  main.replaceWith(next);
  if (inside && focused && document.getElementById(focused)) document.getElementById(focused).focus({ preventScroll: true });
  status.textContent = `updated at ${new Date().toISOString().slice(11, 19)}`;
}

// Search: pages are followed and their hits gathered, until there are a hundred or the end is reached.
async function searchOn() {
  const hits = document.getElementById("hits");
  let rest = document.getElementById("rest");
  while (rest && hits.children.length < 100) {
    const next = await page(rest.href);
    hits.append(...document.adoptNode(next.getElementById("hits")).children);
    document.getElementById("searched").replaceWith(document.adoptNode(next.getElementById("searched")));
    const further = next.getElementById("rest");
    if (further) rest.href = further.href;
    else rest.remove();
    rest = further && rest;
  }
  status.textContent = `${hits.children.length} turns found`;
}

// Keys: letters act only outside of fields, without a modifier, and can be switched off.
function move(by) {
  const items = [...document.querySelectorAll("[data-item]")];
  const at = items.findIndex((item) => item.contains(document.activeElement));
  const next = items[at < 0 ? 0 : Math.min(Math.max(at + by, 0), items.length - 1)];
  if (next) next.focus();
}

const KEYS = {
  j: () => move(1),
  k: () => move(-1),
  n: () => document.querySelector("a[rel=next]")?.click(),
  p: () => document.querySelector("a[rel=prev]")?.click(),
  o: () => {
    const item = document.activeElement.closest("[data-item]");
    const link = item && item.querySelector("th a");
    if (link) link.click();
    else if (item) for (const details of item.querySelectorAll("details")) details.open = !details.open;
  },
  "/": () => document.getElementById("q").focus(),
};

document.addEventListener("keydown", (event) => {
  if (!isOn("keys") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, select, textarea") || !Object.hasOwn(KEYS, event.key)) return;
  event.preventDefault();
  KEYS[event.key]();
});

const live = document.documentElement.dataset.live;
if (live) follow(live);
if (document.getElementById("rest")) searchOn().catch((error) => (status.textContent = `the search stopped: ${error.message}`));
