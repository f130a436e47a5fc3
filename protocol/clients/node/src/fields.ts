/**
 * Types of fields: what a decoded msgpack value must be, and how ours is written. Knows nothing of messages.
 *
 * A reader returns the value as users see it: whole numbers as `number` (those of 63 bits as `bigint`), token ids as
 * `number[]`. A writer returns what the msgpack encoder takes.
 */

/** What is wrong with a value. `path` is where: `sampling.max_tokens`. */
export class FieldError extends Error {
  constructor(
    readonly path: string,
    readonly reason: string,
  ) {
    super(path === '' ? reason : `${path}: ${reason}`);
  }
}

/** A float that has a whole value, as it comes from a frame: no whole number. */
export class WholeFloat {
  constructor(readonly value: number) {}
}

export interface Type {
  read(value: unknown, path: string): unknown;
  write(value: unknown, path: string): unknown;
}

export interface Field {
  readonly type: Type;
  /** Absent: the field must be there. */
  readonly fallback?: unknown;
  /** It is written even where it has its default. */
  readonly isWritten?: boolean;
}

export type Fields = Readonly<Record<string, Field>>;

/** A type that is read as it is written. */
function same(check: (value: unknown, path: string) => unknown): Type {
  return { read: check, write: check };
}

export function int(least: number, most: number): Type {
  function check(value: unknown, path: string): number {
    const number = typeof value === 'bigint' ? Number(value) : value;
    if (typeof number !== 'number' || !Number.isInteger(number)) throw new FieldError(path, 'a whole number is expected');
    if (number < least || number > most) throw new FieldError(path, `${number}, ${least} to ${most} is expected`);
    return number;
  }
  return { read: check, write: (value, path) => wide(check(value, path)) };
}

/** −2⁶³ to 2⁶³−1, as `bigint` where a `number` is not exact. */
export const int64: Type = {
  read(value, path) {
    if (typeof value === 'bigint') return narrow(value);
    if (!Number.isSafeInteger(value)) throw new FieldError(path, 'a whole number is expected');
    return value;
  },
  write(value, path) {
    if (typeof value === 'number' && Number.isSafeInteger(value)) return wide(value);
    if (typeof value !== 'bigint' || BigInt.asIntN(64, value) !== value) {
      throw new FieldError(path, 'a whole number of 64 bits with its sign is expected');
    }
    return wide(narrow(value));
  },
};

export const float = same((value, path) => {
  const number = value instanceof WholeFloat ? value.value : typeof value === 'bigint' ? Number(value) : value;
  if (typeof number !== 'number' || !Number.isFinite(number)) throw new FieldError(path, 'a number is expected');
  return number;
});

export const bool = same((value, path) => {
  if (typeof value !== 'boolean') throw new FieldError(path, 'true or false is expected');
  return value;
});

/** Of at most `most` characters, that is code points. */
export function text(most = Infinity, pattern?: RegExp): Type {
  return same((value, path) => {
    if (typeof value !== 'string') throw new FieldError(path, 'text is expected');
    if (!value.isWellFormed()) throw new FieldError(path, 'text with a lone surrogate');
    if (value.length > most && [...value].length > most) throw new FieldError(path, `at most ${most} characters`);
    if (pattern !== undefined && !pattern.test(value)) throw new FieldError(path, `it is not ${pattern.source}`);
    return value;
  });
}

export function oneOf(...words: string[]): Type {
  return same((value, path) => {
    if (typeof value !== 'string' || !words.includes(value)) throw new FieldError(path, `one of ${words.join(', ')}`);
    return value;
  });
}

/** int32, little-endian, none negative. */
export const tokenIds: Type = {
  read(value, path) {
    if (!(value instanceof Uint8Array) || value.length % 4 !== 0) throw new FieldError(path, 'int32 are expected');
    const view = new DataView(value.buffer, value.byteOffset, value.byteLength);
    const ids = Array.from({ length: value.length / 4 }, (_, place) => view.getInt32(4 * place, true));
    if (ids.some((id) => id < 0)) throw new FieldError(path, 'a token id is negative');
    return ids;
  },
  write(value, path) {
    if (!Array.isArray(value) && !(value instanceof Int32Array)) throw new FieldError(path, 'token ids are expected');
    const view = new DataView(new ArrayBuffer(4 * value.length));
    value.forEach((id: unknown, place: number) => view.setInt32(4 * place, check(id, path), true));
    return new Uint8Array(view.buffer);

    function check(id: unknown, path: string): number {
      if (!Number.isInteger(id) || (id as number) < 0 || (id as number) >= 2 ** 31) {
        throw new FieldError(path, 'a token id is 0 to 2^31-1');
      }
      return id as number;
    }
  },
};

export function orNil(type: Type): Type {
  return {
    read: (value, path) => (value === null ? null : type.read(value, path)),
    write: (value, path) => (value === null ? null : type.write(value, path)),
  };
}

export function array(type: Type, least = 0, most = Infinity): Type {
  function each(value: unknown, path: string, step: (item: unknown, path: string) => unknown): unknown[] {
    if (!Array.isArray(value)) throw new FieldError(path, 'an array is expected');
    if (value.length < least || value.length > most) throw new FieldError(path, `${least} to ${most} elements`);
    return value.map((item, place) => step(item, `${path}[${place}]`));
  }
  return {
    read: (value, path) => each(value, path, type.read),
    write: (value, path) => each(value, path, type.write),
  };
}

/** An array of as many values as `types`, in their order. `mayGrow`: later versions may put more behind them. */
export function tuple(types: readonly Type[], mayGrow: boolean): Type {
  function each(value: unknown, path: string, how: 'read' | 'write'): unknown[] {
    if (!Array.isArray(value) || value.length < types.length || (!mayGrow && value.length > types.length)) {
      throw new FieldError(path, `an array of ${types.length} is expected`);
    }
    return types.map((type, place) => type[how](value[place], `${path}[${place}]`));
  }
  return {
    read: (value, path) => each(value, path, 'read'),
    write: (value, path) => each(value, path, 'write'),
  };
}

/** The first type that takes the value. */
export function either(...types: Type[]): Type {
  function first(value: unknown, path: string, how: 'read' | 'write'): unknown {
    for (const type of types) {
      try {
        return type[how](value, path);
      } catch (error) {
        if (!(error instanceof FieldError)) throw error;
      }
    }
    throw new FieldError(path, 'a value of another type is expected');
  }
  return {
    read: (value, path) => first(value, path, 'read'),
    write: (value, path) => first(value, path, 'write'),
  };
}

function isMap(value: unknown): value is Record<string, unknown> {
  if (typeof value !== 'object' || value === null || value instanceof WholeFloat) return false;
  return !Array.isArray(value) && !ArrayBuffer.isView(value);
}

export function mapOf(type: Type): Type {
  function each(value: unknown, path: string, how: 'read' | 'write'): Record<string, unknown> {
    if (!isMap(value)) throw new FieldError(path, 'a map is expected');
    const entries = Object.entries(value).filter(([, item]) => item !== undefined);
    return Object.fromEntries(entries.map(([key, item]) => [key, type[how](item, `${path}.${key}`)]));
  }
  return {
    read: (value, path) => each(value, path, 'read'),
    write: (value, path) => each(value, path, 'write'),
  };
}

/** Whatever JSON has. */
export const anything: Type = {
  read: (value) => convert(value, narrow),
  write: (value, path) => {
    if (value === undefined || typeof value === 'function' || typeof value === 'symbol') {
      throw new FieldError(path, 'it cannot be written');
    }
    return convert(value, wide);
  },
};

function convert(value: unknown, number: (value: number | bigint) => unknown): unknown {
  if (value instanceof WholeFloat) return value.value;
  if (typeof value === 'number' || typeof value === 'bigint') return number(value);
  if (Array.isArray(value)) return value.map((item) => convert(item, number));
  if (!isMap(value)) return value;
  const entries = Object.entries(value).filter(([, item]) => item !== undefined);
  return Object.fromEntries(entries.map(([key, item]) => [key, convert(item, number)]));
}

/** A map with known fields. `isStrict`: others are refused; else they are skipped. */
export function struct(fields: Fields, isStrict: boolean): Type {
  return {
    read: (value, path) => readFields(fields, value, path, isStrict),
    write: (value, path) => writeFields(fields, value, path),
  };
}

export function readFields(fields: Fields, value: unknown, path: string, isStrict: boolean): Record<string, unknown> {
  if (!isMap(value)) throw new FieldError(path, 'a map is expected');
  const result: Record<string, unknown> = {};
  for (const [name, field] of Object.entries(fields)) {
    if (Object.hasOwn(value, name)) result[name] = field.type.read(value[name], under(path, name));
    else if (field.isWritten) result[name] = field.type.read(field.fallback, under(path, name));
    else if ('fallback' in field) result[name] = structuredClone(field.fallback);
    else throw new FieldError(under(path, name), 'it is missing');
  }
  if (isStrict) {
    const unknown = Object.keys(value).find((name) => !Object.hasOwn(fields, name));
    if (unknown !== undefined) throw new FieldError(under(path, unknown), 'there is no such field');
  }
  return result;
}

/** Fields in the order of the table, without those that have their default. */
export function writeFields(fields: Fields, value: unknown, path: string): Record<string, unknown> {
  if (!isMap(value)) throw new FieldError(path, 'a map is expected');
  const unknown = Object.keys(value).find((name) => !Object.hasOwn(fields, name));
  if (unknown !== undefined) throw new FieldError(under(path, unknown), 'there is no such field');
  const result: Record<string, unknown> = {};
  for (const [name, field] of Object.entries(fields)) {
    let given = value[name];
    if (given === undefined) {
      if (!('fallback' in field)) throw new FieldError(under(path, name), 'it is missing');
      if (!field.isWritten) continue;
      given = field.fallback;
    }
    if (field.isWritten || !('fallback' in field) || !isSame(given, field.fallback)) {
      result[name] = field.type.write(given, under(path, name));
    }
  }
  return result;
}

function isSame(given: unknown, fallback: unknown): boolean {
  if (Array.isArray(fallback) && fallback.length === 0) return Array.isArray(given) && given.length === 0;
  return given === fallback;
}

function under(path: string, name: string): string {
  return path === '' ? name : `${path}.${name}`;
}

/** A `number` where that is exact. */
function narrow(value: number | bigint): number | bigint {
  const number = Number(value);
  return Number.isSafeInteger(number) ? number : value;
}

/** The encoder writes a `number` of more than 32 bits as a float: a `bigint` it writes as it is. */
function wide(value: number | bigint): number | bigint {
  return typeof value === 'number' && Number.isSafeInteger(value) && (value >= 2 ** 32 || value < -(2 ** 31))
    ? BigInt(value)
    : value;
}
