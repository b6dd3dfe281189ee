// Sends requests to the service that served this page. The token is kept in this tab's session only.
const TOKEN = "tiered-index-token";
const ADVICE = {
  0: "Check that the service runs and that this host reaches it, then try again.",
  400: "Change the request.",
  408: "Ask for fewer results, or try again.",
  401: "Enter a token that the service knows.",
  403: "Use a token with this permission.",
  422: "Ask for a shorter time range, or raise the service’s --lookup-… options.",
  500: "Look up the request id in the service’s log.",
  502: "Try again. If the error stays, look at Health and run tiered-index verify.",
};

export const token = {
  get: () => sessionStorage.getItem(TOKEN),
  set: (text) => sessionStorage.setItem(TOKEN, text),
  forget: () => sessionStorage.removeItem(TOKEN),
};

// A problem from the service (RFC 9457), or the reason why there is no response.
export class Problem extends Error {
  constructor(said, retryAfterS = null) {
    super(said.detail);
    Object.assign(this, { failed: [] }, said);
    const wait = retryAfterS ? `Wait ${retryAfterS} s, then try again.` : "Try again later.";
    this.advice = ADVICE[said.status] ?? ([429, 503].includes(said.status) ? wait : "");
  }
}

// Asks the user for a token in place of the one that was sent.
const refuse = (sent) => document.dispatchEvent(new CustomEvent("token-wanted", { detail: sent }));

// Parses JSON. Integers that a JavaScript number would round become texts.
export function exact(text) {
  return JSON.parse(text, (_, value, context) =>
    Number.isInteger(value) && !Number.isSafeInteger(value) && context?.source ? context.source : value);
}

async function ask(path, asked, { accept = "application/json", signal, also = [], body = null } = {}) {
  const url = new URL(`../${path}`, document.baseURI);
  const given = Object.entries(asked).filter(([, value]) => value !== "" && value !== null);
  for (const [name, value] of given) url.searchParams.set(name, value);
  const sent = token.get();
  // a browser can't send other characters in a header
  if (sent && !/^[\x21-\x7e]+$/.test(sent)) {
    refuse(sent);
    throw new Problem({ status: 401, title: "Unauthorized", detail: "No token has these characters." });
  }
  const headers = { accept, ...(sent ? { authorization: `Bearer ${sent}` } : {}) };
  let response;
  try {
    const sending = body === null ? {} : { method: "POST", body: JSON.stringify(body) };
    if (body !== null) headers["content-type"] = "application/json";
    response = await fetch(url, { headers, signal, cache: "no-store", ...sending });
  } catch (error) {
    if (signal?.aborted) throw error;
    if (path !== "readyz") document.dispatchEvent(new CustomEvent("no-answer"));
    throw new Problem({ status: 0, title: "No answer", detail: "The service can’t be reached." });
  }
  if (response.ok || also.includes(response.status)) return response;
  const { status, headers: got } = response;
  let said = { status, title: response.statusText || "Error", detail: `The answer has status ${status}.` };
  if (got.get("content-type")?.startsWith("application/problem+json")) said = exact(await response.text());
  // a late response does not apply to a token that was entered meanwhile
  const isOld = token.get() !== null && token.get() !== sent;
  if (status === 401 && !isOld) refuse(sent);
  throw new Problem(said, got.get("retry-after"));
}

export const brokeOff = () => new Problem({ status: 0, title: "The answer was cut off", detail: "The connection ended before the answer did." });

export async function text(path, asked = {}, more = {}) {
  const response = await ask(path, asked, more);
  try {
    return await response.text();
  } catch (error) {
    throw more.signal?.aborted ? error : brokeOff();
  }
}

export async function json(path, asked = {}, more = {}) {
  const whole = await text(path, asked, more);
  try {
    return exact(whole);
  } catch {
    throw brokeOff();
  }
}

// Yields each line of a stream when it arrives.
export async function* lines(path, asked, signal) {
  const response = await ask(path, asked, { accept: "application/x-ndjson", signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let read;
    try {
      read = await reader.read();
    } catch (error) {
      if (signal.aborted) throw error;
      return;
    }
    if (read.done) return;
    const parts = (rest + read.value).split("\n");
    rest = parts.pop();
    for (const part of parts) yield exact(part);
  }
}

// Returns [{name, labels, value, meaning}] of Prometheus's text format, without the buckets of histograms.
export function metrics(page) {
  const meanings = {};
  const found = [];
  for (const line of page.split("\n")) {
    const help = /^# HELP (\S+) (.*)/.exec(line);
    if (help) meanings[help[1]] = help[2];
    const sample = /^(\w+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (sample && !/_(bucket|created)$/.test(sample[1])) {
      const meaning = meanings[sample[1]] ?? meanings[sample[1].replace(/_(sum|count|total)$/, "")] ?? "";
      found.push({ name: sample[1], labels: sample[2] ?? "", value: Number(sample[3]), meaning });
    }
  }
  return found;
}
