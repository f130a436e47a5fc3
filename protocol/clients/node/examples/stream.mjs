// node examples/stream.mjs URL PROMPT: print an answer as it comes. Ctrl-C ends the request.

import { connect } from 'deepinfer-client';

const [url, prompt] = process.argv.slice(2);
if (prompt === undefined) {
  console.error('usage: node examples/stream.mjs URL PROMPT');
  process.exit(2);
}

const interrupt = new AbortController();
process.once('SIGINT', () => interrupt.abort());

const client = await connect(url);
const stream = client.stream(prompt, { max_tokens: 256 }, { signal: interrupt.signal });
for await (const tok of stream) process.stdout.write(tok.text);
console.log(`\n[${stream.reason}, ${stream.usage?.generated_tokens} tokens]`);
client.close();
