// Lines of `SENDER HEX` on standard input: the verdict on each.

import { readFileSync } from 'node:fs';

import { WireError, decodeClient, decodeServer } from '../dist/codec.js';

for (const line of readFileSync(0, 'utf-8').trimEnd().split('\n')) {
  const [sender, hex = ''] = line.split(' ');
  try {
    (sender === 'server' ? decodeServer : decodeClient)(Buffer.from(hex, 'hex'));
    console.log('ok');
  } catch (error) {
    if (!(error instanceof WireError)) throw error;
    console.log(error.code);
  }
}
