// The page put together: which view is shown, by the address, and the token where the service wants one.
import { json, token } from "./api.js";
import * as browse from "./browse.js";
import * as health from "./health.js";
import { find } from "./page.js";
import * as search from "./search.js";
import * as stored from "./stored.js";

const READY_EVERY_MS = 15000;
const VIEWS = { search: search.show, browse: browse.show, files: stored.showFiles, health: health.show,
  cost: stored.showCost };
// they tell of all topics: to a token for some of them the service answers 403
const WHOLE = ["files", "health"];
let shown = null;
let isScoped = false;
let turn = 0;
// whose rights `isScoped` tells
let known;

// A link may carry a token before its view (`#token=...&search?...`). What follows # is sent to nobody; the address,
// which people copy, loses it at once.
function takeToken() {
  const [, given, view] = /^#token=([^&]*)&?(.*)/s.exec(location.hash) ?? [];
  if (given) token.set(given);
  if (given !== undefined) history.replaceState(null, "", `#${view || "search"}`);
}

// Asks what the token may see, once for each; returns whether the service takes it.
async function learn() {
  const given = token.get();
  if (known === given) return true;
  try {
    isScoped = (await json("v1/token")).topics !== null;
    known = given;
  } catch (problem) {
    if (problem.status === 401) return false;
    // its views say the same then
    isScoped = false;
  }
  return true;
}

async function show() {
  takeToken();
  const mine = (turn += 1);
  if (!(await learn()) || mine !== turn) return;
  const [name, params] = location.hash.slice(1).split(/\?(.*)/s);
  const view = name in VIEWS && !(isScoped && WHOLE.includes(name)) ? name : "search";
  stored.leave();
  health.leave();
  find("token-view").hidden = true;
  for (const one of Object.keys(VIEWS)) find(`${one}-view`).hidden = one !== view;
  for (const link of document.querySelectorAll("nav a")) {
    link.hidden = isScoped && WHOLE.includes(link.hash.slice(1));
    if (link.hash === `#${view}`) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  find("sign-out").hidden = !token.get();
  document.title = `${document.querySelector(`#${view}-view h2`).textContent} · tiered_index`;
  // the reader of a screen goes on where the new view begins
  if (shown && shown !== view) find("main").focus({ preventScroll: true });
  shown = view;
  VIEWS[view](new URLSearchParams(params));
}

function askForToken({ detail: refused }) {
  // what was asked beside the first says no more, and would take back why it was refused
  if (!refused && !find("token-view").hidden) return;
  stored.leave();
  health.leave();
  for (const one of Object.keys(VIEWS)) find(`${one}-view`).hidden = true;
  find("token-said").textContent = refused ? "The service does not know this token." : "";
  find("token").setAttribute("aria-invalid", String(Boolean(refused)));
  token.forget();
  find("sign-out").hidden = true;
  find("token-view").hidden = false;
  find("token").focus();
}

document.addEventListener("token-wanted", askForToken);
// the head must not say "ready" above what says that there is no answer
document.addEventListener("no-answer", health.ready);
find("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  token.set(find("token").value.trim());
  find("token").value = "";
  show();
});
find("sign-out").addEventListener("click", () => {
  token.forget();
  location.hash = "#search";
  location.reload();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  find("main").focus();
});
addEventListener("hashchange", show);
search.start();
browse.start();
stored.start();
health.start();
show();
health.ready();
setInterval(() => document.hidden || health.ready(), READY_EVERY_MS);
