/** Bytes to messages and back. Any bytes become a message or a `WireError`. */

import { decode as unpack, encode as pack } from '@msgpack/msgpack';

import { FieldError, WholeFloat, readFields, writeFields } from './fields.js';
import { FROM_CLIENT, FROM_SERVER, type Kind } from './messages.js';
import { MAX_FRAME_BYTES, type Path, StructureError, checkStructure } from './structure.js';
import type { ClientMessage, ServerMessage } from './types.js';

export type Refusal = 'E_DECODE' | 'E_TOO_LARGE' | 'E_UNKNOWN_KIND';

/** The frame is no message of this wire, or a message cannot be written. `field` is where the fault lies. */
export class WireError extends Error {
  override readonly name = 'WireError';

  constructor(
    readonly code: Refusal,
    detail: string,
    readonly field = '',
  ) {
    super(detail);
  }
}

/** What a server said; fields that are absent have their defaults. Throws `WireError`. */
export function decodeServer(frame: Uint8Array): ServerMessage {
  const message = decode(frame, FROM_SERVER) as unknown as ServerMessage;
  if (message.kind === 'delta' && message.logprobs !== null && message.logprobs.length !== message.token_ids.length) {
    throw new WireError('E_DECODE', 'tokens and logprobs differ in number', 'logprobs');
  }
  return message;
}

/** What a client said, as a server reads it. Throws `WireError`. */
export function decodeClient(frame: Uint8Array): ClientMessage {
  const message = decode(frame, FROM_CLIENT) as unknown as ClientMessage;
  checkClient(message);
  return message;
}

/** The frame of `message`; fields may be absent that have a default. Throws `WireError`. */
export function encode(message: ClientMessage | ServerMessage): Uint8Array {
  const { kind, ...fields } = message as { kind: string } & Record<string, unknown>;
  const known = FROM_CLIENT[kind] ?? FROM_SERVER[kind];
  if (known === undefined) throw new WireError('E_UNKNOWN_KIND', `there is no kind ${kind}`, 'kind');
  if (kind in FROM_CLIENT) checkClient(message as ClientMessage);
  const frame = saying(() => pack({ kind, ...writeFields(known.fields, fields, '') }, { useBigInt64: true }));
  if (frame.length > MAX_FRAME_BYTES) {
    throw new WireError('E_TOO_LARGE', `${frame.length} bytes, at most ${MAX_FRAME_BYTES} are allowed`);
  }
  saying(() => checkStructure(frame)); // depth and number of values of what the user gave
  return frame;
}

function decode(frame: Uint8Array, kinds: Readonly<Record<string, Kind>>): Record<string, unknown> {
  if (frame.length > MAX_FRAME_BYTES) throw new WireError('E_TOO_LARGE', `${frame.length} bytes`);
  return saying(() => {
    const wholeFloats = checkStructure(frame);
    const { kind, ...fields } = unpack(frame, { useBigInt64: true }) as Record<string, unknown>;
    for (const path of wholeFloats) mark(fields, path);
    if (typeof kind !== 'string' || kind === '') throw new WireError('E_DECODE', 'it has no kind', 'kind');
    if (!Object.hasOwn(kinds, kind)) throw new WireError('E_UNKNOWN_KIND', `there is no kind ${kind}`, 'kind');
    const known = kinds[kind] as Kind;
    return { kind, ...readFields(known.fields, fields, '', known.isStrict) };
  });
}

/** The number at `path` as the float that it was. */
function mark(tree: Record<string, unknown>, path: Path): void {
  let branch = tree;
  for (const step of path.slice(0, -1)) branch = branch[step] as Record<string, unknown>;
  const last = path[path.length - 1] as string;
  branch[last] = new WholeFloat(branch[last] as number);
}

function checkClient(message: ClientMessage): void {
  if (message.kind === 'hello' && message.min_version > message.max_version) {
    throw new WireError('E_DECODE', 'the lowest version is above the highest', 'min_version');
  }
  if (message.kind === 'submit') {
    const given = [message.prompt, message.token_ids, message.messages].filter((value) => value != null);
    if (given.length !== 1) {
      throw new WireError('E_DECODE', 'exactly one of prompt, token_ids and messages is expected', 'prompt');
    }
  }
}

function saying<T>(step: () => T): T {
  try {
    return step();
  } catch (error) {
    if (error instanceof FieldError) throw new WireError('E_DECODE', error.message, error.path);
    if (error instanceof StructureError || error instanceof RangeError || error instanceof TypeError) {
      throw new WireError('E_DECODE', error.message);
    }
    throw error instanceof WireError ? error : new WireError('E_DECODE', String(error));
  }
}
