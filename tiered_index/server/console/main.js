// The page: shows the view that the address names, and asks for a token if the service needs one.
import { json, token } from "./api.js";
import * as browse from "./browse.js";
import * as health from "./health.js";
import { find } from "./page.js";
import * as search from "./search.js";
import * as stored from "./stored.js";

const READY_EVERY_MS = 15000;
const VIEWS = { search: search.show, browse: browse.show, files: stored.showFiles, health: health.show,
  cost: stored.showCost };
// views about all topics: the service answers 403 to a token for some topics
const WHOLE = ["files", "health"];
let shown = null;
let isScoped = false;
let turn = 0;
// the token that `isScoped` is about
let known;

// A link may have a token before its view (`#token=...&search?...`). Browsers do not send the part after #. The token
// is removed from the address at once, because people copy addresses.
function takeToken() {
  const [, given, view] = /^#token=([^&]*)&?(.*)/s.exec(location.hash) ?? [];
  if (given) token.set(given);
  if (given !== undefined) history.replaceState(null, "", `#${view || "search"}`);
}

// Asks for the token's permissions, once for each token; returns whether the service accepts it.
async function learn() {
  const given = token.get();
  if (known === given) return true;
  try {
    isScoped = (await json("v1/token")).topics !== null;
    known = given;
  } catch (problem) {
    if (problem.status === 401) return false;
    // the views report the same problem
    isScoped = false;
  }
  return true;
}

async function show() {
  takeToken();
  const mine = (turn += 1);
  if (!(await learn()) || mine !== turn) return;
  const [name, params] = location.hash.slice(1).split(/\?(.*)/s);
  const view = Object.hasOwn(VIEWS, name) && !(isScoped && WHOLE.includes(name)) ? name : "search";
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
  // a screen reader continues at the start of the new view
  if (shown && shown !== view) find("main").focus({ preventScroll: true });
  shown = view;
  VIEWS[view](new URLSearchParams(params));
}

function askForToken({ detail: refused }) {
  // a second request without a token must not clear the reason of a refusal
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
// the head must not show "ready" after a request without an answer
document.addEventListener("no-answer", health.ready);
find("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  token.set(find("token").value.trim());
  find("token").value = "";
  // the page may have data that another token may not see
  if (shown) location.reload(); else show();
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
