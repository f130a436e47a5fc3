// What the session says, for what it hears: gaps, repetitions, lost connections, without a socket.

import assert from 'node:assert/strict';
import { beforeEach, test } from 'node:test';

import { decodeClient, encode } from '../dist/codec.js';
import { ConnectionLost, ServerError } from '../dist/errors.js';
import { Session } from '../dist/session.js';
import { TokenStream } from '../dist/stream.js';
import { limits, welcome } from './welcome.mjs';

let session;
let stream;

function hear(message, now = 0) {
  session.receive([encode(message)], now);
}

function said() {
  return session.takeFrames().map(decodeClient);
}

function delta(seq, ...token_ids) {
  return { kind: 'delta', id: 'r', seq, index: seq, token_ids };
}

function submit(more = {}) {
  stream = new TokenStream('r', () => session.read('r'), () => session.cancel('r'));
  session.submit({ kind: 'submit', id: 'r', prompt: 'x', resumable: true, credit: 4, ...more }, stream, 4);
}

async function rest() {
  const ids = [];
  for await (const chunk of stream) ids.push(...chunk.token_ids);
  return ids;
}

beforeEach(() => {
  session = new Session({ session: 's'.repeat(32), token: '', name: 'test', giveUpMs: 5000 });
  session.hello(0);
  hear(welcome);
  said();
  submit();
});

test('a repetition is dropped, a gap is closed by one RESUME, and an end behind a gap waits', async () => {
  hear(delta(0, 1));
  hear(delta(0, 1));
  said();
  hear(delta(2, 3));
  hear(delta(3, 4));
  hear({ kind: 'finish', id: 'r', reason: 'length', seq: 4 });
  assert.deepEqual(said(), [{ kind: 'resume', id: 'r', next: 1, limit: 4 }]);
  [delta(1, 2), delta(2, 3), delta(3, 4)].forEach((message) => hear(message));
  hear({ kind: 'finish', id: 'r', reason: 'length', seq: 4 });
  assert.deepEqual(await rest(), [1, 2, 3, 4]);
  assert.equal(stream.reason, 'length');
});

test('credit is given when half of the window was read', async () => {
  said();
  hear(delta(0, 1));
  hear(delta(1, 2));
  await stream.next();
  assert.deepEqual(said(), []);
  await stream.next();
  assert.deepEqual(said(), [{ kind: 'credit', id: 'r', limit: 6, ack: 2 }]);
});

test('E_HELLO is answered by one HELLO, and WELCOME by what is open', () => {
  const [first] = session.takeFrames();
  const stranger = { kind: 'error', code: 7, name: 'E_HELLO', text: 'say hello' };
  hear(stranger);
  hear(stranger);
  assert.deepEqual(said().map((message) => message.kind), ['hello']);
  hear(welcome);
  assert.deepEqual(session.takeFrames(), [first], 'the same SUBMIT, byte for byte');
  hear(delta(0, 1));
  hear(stranger);
  said();
  hear(welcome);
  assert.deepEqual(said(), [{ kind: 'resume', id: 'r', next: 1, limit: 4 }]);
});

test('another engine has lost what was begun', async () => {
  hear(delta(0, 1));
  hear({ ...welcome, engine: 'two' });
  assert.deepEqual((await stream.next()).value.token_ids, [1]);
  await assert.rejects(stream.next(), ConnectionLost);
});

test('a stream that nothing was heard of is asked for again, resumable or not', async () => {
  said();
  hear(welcome);
  assert.deepEqual(said().map((message) => message.kind), ['submit']);
  hear({ kind: 'finish', id: 'r', reason: 'length' });
  submit({ resumable: false });
  said();
  hear(welcome);
  assert.deepEqual(said().map((message) => message.kind), ['submit']);
  hear(delta(0, 1));
  await stream.next();
  hear(welcome);
  assert.deepEqual(said(), []);
  await assert.rejects(stream.next(), ConnectionLost);
});

test('the first WELCOME is answered by every request, resumable or not', () => {
  session = new Session({ session: 's'.repeat(32), token: '', name: 'test', giveUpMs: 5000 });
  submit({ resumable: false });
  assert.deepEqual(said(), []);
  hear(welcome);
  assert.deepEqual(said().map((message) => message.kind), ['submit']);
});

test('a window is no larger than what another server has room for', async () => {
  said();
  hear({ ...welcome, engine: 'two', limits: { ...limits, max_unacked_tokens: 2 } });
  said();
  hear(delta(0, 1));
  await stream.next();
  assert.deepEqual(said(), [{ kind: 'credit', id: 'r', limit: 3, ack: 1 }]);
});

test('what the server no longer keeps is lost', async () => {
  hear(delta(0, 1));
  hear({ kind: 'error', code: 14, name: 'E_NOT_FOUND', text: 'no longer kept', id: 'r', seq: 1 });
  await stream.next();
  await assert.rejects(stream.next(), ConnectionLost);
});

test('a cancel after the end drops what was not read, without an error', async () => {
  hear(delta(0, 1));
  hear({ kind: 'finish', id: 'r', reason: 'length', seq: 1 });
  stream.cancel();
  assert.deepEqual(await rest(), []);
  assert.equal(stream.reason, 'length');
  submit();
  hear({ kind: 'error', code: 20, name: 'E_OVERLOADED', text: 'full', id: 'r' });
  stream.cancel();
  assert.deepEqual(await rest(), []);
  assert.equal(stream.reason, 'abort');
});

test('a REJECT is remembered until WELCOME, and HELLO is said again no earlier than it says', () => {
  session = new Session({ session: 's'.repeat(32), token: '', name: 'test', giveUpMs: 5000 });
  session.hello(0);
  said();
  const reject = { kind: 'reject', code: 20, name: 'E_OVERLOADED', text: 'full', min_version: 1, max_version: 1 };
  hear({ ...reject, retryable: true, retry_after_ms: 3000 });
  assert.equal(session.refusal.code, 20);
  session.tick(2000);
  assert.deepEqual(said(), []);
  session.tick(3000);
  assert.deepEqual(said().map((message) => message.kind), ['hello']);
  hear(welcome);
  assert.equal(session.refusal, null);
});

test('a cancelled stream drops what comes, ends with FINISH, and is cancelled again after a cut', async () => {
  said();
  hear(delta(0, 1));
  stream.cancel();
  hear(delta(1, 2));
  assert.deepEqual(said(), [{ kind: 'cancel', id: 'r' }]);
  hear(welcome);
  assert.deepEqual(said(), [{ kind: 'cancel', id: 'r' }]);
  hear({ kind: 'finish', id: 'r', reason: 'abort', seq: 9 });
  assert.deepEqual(await rest(), []);
  assert.equal(stream.reason, 'abort');
});

test('silence after a ping is a lost connection, and for too long the end', async () => {
  said();
  session.tick(1000);
  assert.deepEqual(said().map((message) => message.kind), ['ping']);
  session.tick(4001);
  assert.deepEqual(said().map((message) => message.kind), ['hello']);
  session.tick(9100);
  await assert.rejects(stream.next(), ConnectionLost);
});

test('a refusal says what a program needs', async () => {
  hear({ kind: 'error', code: 20, name: 'E_OVERLOADED', text: 'full', id: 'r', retryable: true, retry_after_ms: 9 });
  await assert.rejects(
    stream.next(),
    (error) => error instanceof ServerError && error.code === 20 && error.retryable && error.retryAfterMs === 9,
  );
});

test('what is no message is skipped', () => {
  session.receive([Buffer.from('c1', 'hex')], 0);
  session.receive([encode(delta(0, 1)), encode(delta(1, 1))], 0);
  assert.equal(stream.numRead, 0);
});
