// What a client leaves behind, without a server.

import assert from 'node:assert/strict';
import { getEventListeners } from 'node:events';
import { test } from 'node:test';

import { Dealer } from 'zeromq';

import { Client, connect } from '../dist/client.js';
import { decodeClient, encode } from '../dist/codec.js';
import { welcome } from './welcome.mjs';

const NOBODY = 'ipc:///tmp/deepinfer-nobody.sock';

/** `close` itself cannot be replaced; it is shadowed. */
async function countCloses(work) {
  const { close } = Dealer.prototype;
  let numClosed = 0;
  Object.defineProperty(Dealer.prototype, 'close', {
    configurable: true,
    value() {
      numClosed += 1;
      close.call(this);
    },
  });
  try {
    await work();
  } finally {
    delete Dealer.prototype.close;
  }
  return numClosed;
}

function timers() {
  return process.getActiveResourcesInfo().filter((name) => name === 'Timeout').length;
}

test('a stream that was read out or cancelled listens to its signal no longer', async () => {
  const client = new Client(NOBODY, {});
  const { signal } = new AbortController();
  const streams = Array.from({ length: 8 }, () => client.stream([1], {}, { signal }));
  assert.equal(getEventListeners(signal, 'abort').length, 8);
  for (const stream of streams.slice(0, 4)) stream.cancel();
  assert.equal(getEventListeners(signal, 'abort').length, 4);
  const failing = streams.at(-1).next();
  client.close();
  await assert.rejects(failing);
  await assert.rejects(client.opened);
  for (const stream of streams.slice(4, 7)) await assert.rejects(stream.next());
  assert.equal(getEventListeners(signal, 'abort').length, 0);
});

test('an abort ends the streams that listen to it', async () => {
  const client = new Client(NOBODY, {});
  const controller = new AbortController();
  const stream = client.stream([1], {}, { signal: controller.signal });
  controller.abort();
  assert.deepEqual(await stream.next(), { done: true, value: undefined });
  assert.equal(stream.reason, 'abort');
  client.close();
  await assert.rejects(client.opened);
});

test('an abort after the end drops what was not read', async () => {
  const client = new Client(NOBODY, {});
  const controller = new AbortController();
  const stream = client.stream([1], {}, { signal: controller.signal });
  for (const index of [0, 1]) stream.push({ sample: 0, index, token_ids: [1], text: '', logprobs: null });
  stream.close(null);
  assert.deepEqual((await stream.next()).value.index, 0);
  controller.abort();
  assert.deepEqual(await stream.next(), { done: true, value: undefined });
  assert.equal(getEventListeners(controller.signal, 'abort').length, 0);
  client.close();
  await assert.rejects(client.opened);
});

test('a stream is resumable unless it is said that it is not', async () => {
  const client = new Client(NOBODY, {});
  for (const resumable of [undefined, true, false]) client.stream({ token_ids: [1], resumable });
  client.session.takeFrames();
  client.session.receive([encode(welcome)], 0);
  const submits = client.session.takeFrames().map(decodeClient);
  assert.deepEqual(submits.map((message) => message.resumable), [true, true, false]);
  client.close();
  await client.opened.catch(() => {});
});

test('what cannot be sent loses the connection also while another try is due', async () => {
  const client = new Client(NOBODY, {});
  while (client.retrying === undefined) await new Promise((resolve) => setImmediate(resolve)); // for its HELLO
  client.session.receive([encode(welcome)], 0);
  assert.ok(client.isConnected);
  client.unsent();
  assert.ok(!client.isConnected);
  client.close();
  await client.opened.catch(() => {});
});

for (const [name, url, options] of [
  ['url', 'nowhere', {}],
  ['key', NOBODY, { curve: { serverKey: 'k', publicKey: 'k', secretKey: 'k' } }],
  ['token', NOBODY, { token: 'x'.repeat(300) }],
]) {
  test(`a ${name} that is none leaves no socket and no timer`, async () => {
    const before = timers();
    const numClosed = await countCloses(() => assert.rejects(connect(url, options)));
    assert.equal(numClosed, 1);
    assert.equal(timers(), before);
  });
}
