// node test/probe.mjs URL IDS MAX_TOKENS [NAME=VALUE ...]: one request, and a line for all that comes of it.
//
//   window=N  delay_ms=N (after each chunk)  cancel_after=N (tokens, after the delay)  n=N  temperature=X  regex=R
//   resumable=0  token=TEXT  server_key=K public_key=K secret_key=K  timeout_ms=N  give_up_ms=N
//
// Lines: `delta SAMPLE INDEX IDS REASON`, then `finish REASON PROMPT GENERATED` or `error CODE FIELD`, at the end
// `reconnects N` and `deadline MS`, the most that a chunk came with (`-`: none). The same as of the C client's probe.

import { ConnectionLost, ServerError, connect } from '../dist/index.js';

const [url, ids, most, ...pairs] = process.argv.slice(2);
const given = Object.fromEntries(pairs.map((pair) => pair.split(/=(.*)/s)));
const number = (name, fallback) => (given[name] === undefined ? fallback : Number(given[name]));
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

let client;
let deadlineMs = -1;
try {
  client = await connect(url, {
    token: given.token ?? '',
    window: number('window', 1024),
    timeoutMs: number('timeout_ms', 10_000),
    giveUpMs: number('give_up_ms', 30_000),
    ...((given.server_key ?? given.public_key ?? given.secret_key) && {
      curve: { serverKey: given.server_key, publicKey: given.public_key, secretKey: given.secret_key },
    }),
  });
  const request = { token_ids: ids.split(',').map(Number), resumable: given.resumable === '0' ? false : undefined };
  const stream = client.stream(request, {
    max_tokens: Number(most),
    ignore_eos: given.regex === undefined,
    regex: given.regex ?? null,
    n: number('n', 1),
    temperature: number('temperature', 0),
  });
  for await (const chunk of stream) {
    console.log(`delta ${chunk.sample} ${chunk.index} ${chunk.token_ids.join(',') || '-'} ${chunk.reason ?? '-'}`);
    deadlineMs = Math.max(deadlineMs, client.deadlineMs ?? -1);
    if (given.delay_ms) await sleep(number('delay_ms'));
    if (stream.numRead >= number('cancel_after', Infinity)) stream.cancel();
  }
  console.log(`finish ${stream.reason} ${stream.usage?.prompt_tokens ?? 0} ${stream.usage?.generated_tokens ?? 0}`);
} catch (error) {
  if (error instanceof ServerError) console.log(`error ${error.code} ${error.field || '-'}`);
  else if (error instanceof ConnectionLost) console.log('error lost -');
  else if (error instanceof RangeError) console.log(`error 0 ${error.message.split(':')[0]}`);
  else throw error;
}
console.log(`reconnects ${client?.numReconnects ?? 0}`);
console.log(`deadline ${deadlineMs < 0 ? '-' : deadlineMs.toFixed(0)}`);
client?.close();
