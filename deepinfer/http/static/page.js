// The page of a DeepInfer server: asks /v1/chat/completions, shows tokens as they come, and the figures of /stats.
// Whatever the server says becomes text nodes. The key stays in its field: nothing is stored.

const REFRESH_MS = 1000;
const UNKNOWN = "–";
const at = (id) => document.getElementById(id);

function headers() {
  const key = at("key").value.trim();
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

/** What a response that is not good says of itself. */
async function failure(response) {
  const said = await response.json().catch(() => null);
  return new Error(said?.error?.message ?? `${response.status} ${response.statusText}`);
}

// ---- figures

let before = null;
let refreshing = 0;
let numRefreshes = 0;

async function refresh() {
  clearTimeout(refreshing);
  if (document.hidden) return; // visibilitychange calls again
  const number = ++numRefreshes;
  let isLast = false;
  try {
    const response = await fetch("stats", { headers: headers(), signal: AbortSignal.timeout(10 * REFRESH_MS) });
    isLast = response.status === 401; // until there is another key
    if (!response.ok) throw await failure(response);
    const now = await response.json();
    showFigures(now, before);
    before = now;
    if (!at("model").length) await showModels();
    at("status").textContent = now.status;
  } catch (error) {
    before = null;
    at("status").textContent = error.message;
  }
  if (number === numRefreshes && !isLast) refreshing = setTimeout(refresh, REFRESH_MS);
}

function showFigures(now, then) {
  const since = (name) => (then === null ? 0 : now[name] - then[name]);
  const seconds = since("time_s");
  const forwards = since("decode_forwards");
  const perForward = forwards > 0 ? since("decode_tokens") / forwards : now.decode_tokens / now.decode_forwards;
  at("running").textContent = now.num_running;
  at("waiting").textContent = now.num_waiting;
  at("rate").textContent = seconds > 0 ? (since("generation_tokens") / seconds).toFixed(0) : UNKNOWN;
  at("cache").textContent = percent(now.kv_cache_usage);
  at("hits").textContent = now.prompt_tokens ? percent(now.prompt_tokens_cached / now.prompt_tokens) : UNKNOWN;
  at("acceptance").textContent = now.decode_forwards ? perForward.toFixed(2) : UNKNOWN;
}

function percent(share) {
  return `${(100 * share).toFixed(1)} %`;
}

async function showModels() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) throw await failure(response);
  const { data } = await response.json();
  at("model").replaceChildren(...data.map(({ id }) => new Option(id)));
}

// ---- one answer

let asking = null;

async function ask(event) {
  event.preventDefault();
  if (asking) return;
  asking = new AbortController();
  const answer = clearAnswer();
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: headers(),
      body: JSON.stringify(asked()),
      signal: asking.signal,
    });
    if (!response.ok) throw await failure(response);
    for await (const chunk of events(response.body)) show(answer, chunk);
    if (!answer.ended) throw new Error("the answer was cut off");
  } catch (error) {
    if (asking.signal.aborted) answer.reason = "stopped";
    else at("error").textContent = error.message;
  }
  at("summary").textContent = summary(answer);
  asking = null;
  setBusy(false);
}

function asked() {
  const maxTokens = at("max-tokens").valueAsNumber;
  return {
    model: at("model").value,
    messages: [{ role: "user", content: at("prompt").value }],
    stream: true,
    ...(maxTokens && { max_tokens: maxTokens }),
  };
}

function clearAnswer() {
  for (const id of ["reasoning", "content", "error", "summary"]) at(id).replaceChildren();
  at("thinking").hidden = true;
  setBusy(true);
  return { started_ms: performance.now(), first_ms: null, last_ms: null, tokens: null, reason: "", ended: false };
}

function setBusy(isBusy) {
  at("answer").ariaBusy = isBusy;
  at("send").disabled = isBusy;
  at("stop").disabled = !isBusy;
}

/** The data of server-sent events up to [DONE]: an event may come in several reads, a read may hold several events. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const line of blocks.flatMap((block) => block.split("\n"))) {
      if (!line.startsWith("data: ")) continue; // a comment keeps the connection alive
      const data = line.slice("data: ".length);
      yield data === "[DONE]" ? null : JSON.parse(data);
    }
  }
}

function show(answer, chunk) {
  if (chunk === null) {
    answer.ended = true;
    return;
  }
  if (chunk.error) throw new Error(chunk.error.message);
  const [choice] = chunk.choices;
  if (choice?.delta?.reasoning_content) {
    at("thinking").hidden = false;
    append(answer, at("reasoning"), choice.delta.reasoning_content);
  }
  if (choice?.delta?.content) append(answer, at("content"), choice.delta.content);
  if (choice?.finish_reason) answer.reason = choice.finish_reason;
  if (chunk.usage) answer.tokens = chunk.usage.completion_tokens;
}

/** To the one text node of `place`. */
function append(answer, place, text) {
  answer.last_ms = performance.now();
  answer.first_ms ??= answer.last_ms;
  if (place.firstChild) place.firstChild.appendData(text);
  else place.append(text);
}

function summary({ started_ms, first_ms, last_ms, tokens, reason }) {
  const parts = [reason];
  if (tokens !== null) parts.push(`${tokens} tokens`);
  if (first_ms !== null) parts.push(`first after ${((first_ms - started_ms) / 1000).toFixed(2)} s`);
  if (tokens > 1 && last_ms > first_ms) {
    parts.push(`${((1000 * (tokens - 1)) / (last_ms - first_ms)).toFixed(1)} tokens/s`);
  }
  return parts.filter(Boolean).join(", ");
}

at("form").addEventListener("submit", ask);
at("stop").addEventListener("click", () => asking?.abort());
at("key").addEventListener("change", refresh);
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("form").requestSubmit();
});
document.addEventListener("visibilitychange", refresh);
refresh();
