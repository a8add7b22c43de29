/** Questions to the console's server: JSON, a token where it wants one, and its stream of new positions. */
import { pending, pool, tokenWanted } from './state.js';

const TOKEN = 'headwater-console-token';
let memory = '';

/** An answer that says why there is none. */
export class ApiError extends Error {
  constructor(status, code, text) {
    super(text);
    this.status = status;
    this.code = code;
  }

  /** Whether asking again later can help. */
  get passing() {
    return this.status === 0 || this.status === 503;
  }
}

/** The token of this tab. */
export function token() {
  try {
    return window.sessionStorage.getItem(TOKEN) || memory;
  } catch {
    return memory;
  }
}

/** Keeps the token for as long as the tab is open. */
export function keepToken(text) {
  memory = text;
  try {
    window.sessionStorage.setItem(TOKEN, text);
  } catch {
    // Storage may be forbidden: the token then lasts as long as the page.
  }
  tokenWanted.value = false;
}

/** The address of a question. Empty parameters are left out. */
export function questionAddress(path, values = {}) {
  const query = new URLSearchParams();
  if (path !== 'pools' && pool.value) query.set('pool', pool.value);
  for (const [key, value] of Object.entries(values)) {
    if (value !== '' && value !== null && value !== undefined) query.set(key, String(value));
  }
  const text = query.toString();
  return `/api/${path}${text ? `?${text}` : ''}`;
}

function headers() {
  const known = token();
  return known ? { Authorization: `Bearer ${known}` } : {};
}

async function failure(response) {
  let text = `The server answered ${response.status}.`;
  let code = '';
  try {
    const body = await response.json();
    text = body.error?.message || text;
    code = body.error?.code || '';
  } catch {
    // The answer was not JSON: its status says enough.
  }
  if (response.status === 401) tokenWanted.value = true;
  return new ApiError(response.status, code, text);
}

/** Fetches, and turns every failure but an abort into an ApiError. */
async function request(location, options) {
  let response;
  pending.value = pending.peek() + 1;
  try {
    response = await fetch(location, { ...options, headers: { ...headers(), ...options.headers }, credentials: 'omit' });
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new ApiError(0, 'unreachable', 'The console’s server does not answer. The page shows what it has, and asks again.');
  } finally {
    pending.value = pending.peek() - 1;
  }
  if (!response.ok) throw await failure(response);
  return response;
}

/** Whole numbers that are too long for a JavaScript number stay as they are written: hashes and seeds have 64 bits. */
function exact(key, value, context) {
  const rounded = typeof value === 'number' && Number.isInteger(value) && !Number.isSafeInteger(value);
  return rounded && context?.source ? context.source : value;
}

/** Answers with such numbers. */
const WITH_LONG_NUMBERS = ['events', 'decision'];

/** Asks a question and returns the decoded answer. */
export async function ask(path, values = {}, signal = undefined) {
  const response = await request(questionAddress(path, values), { signal });
  return WITH_LONG_NUMBERS.includes(path) ? JSON.parse(await response.text(), exact) : response.json();
}

/** Sends a command to a worker. */
export async function command(worker, name, values) {
  const query = new URLSearchParams({ pool: pool.value });
  const location = `/admin/workers/${encodeURIComponent(worker)}/${encodeURIComponent(name)}?${query}`;
  const body = JSON.stringify(values);
  const response = await request(location, { method: 'POST', body, headers: { 'Content-Type': 'application/json' } });
  return response.json();
}

/** Sets the engine weights of the pool; none removes them. */
export async function setEngineWeights(weights) {
  const location = `/admin/pools/${encodeURIComponent(pool.value)}/weights`;
  const response = await request(location, { method: 'POST', body: JSON.stringify(weights), headers: { 'Content-Type': 'application/json' } });
  return response.json();
}

/** A stream that has said nothing for so long (ms) is taken as lost: the server sends a comment every 10 s. */
const SILENCE = 30_000;

/** Reads a stream of server-sent events until it ends or falls silent; `receive` gets each decoded datum. */
export async function follow(path, values, receive, signal) {
  const response = await fetch(questionAddress(path, values), { signal, headers: headers(), credentials: 'omit' });
  if (!response.ok) throw await failure(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const silent = setTimeout(() => reader.cancel(), SILENCE);
    const { value, done } = await reader.read().finally(() => clearTimeout(silent));
    if (done) return;
    const blocks = (rest + value).replace(/\r\n/g, '\n').split('\n\n');
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block
        .split('\n')
        .filter((line) => line.startsWith('data:'))
        .map((line) => line.slice(5).trim())
        .join('\n');
      if (data) receive(JSON.parse(data));
    }
  }
}
