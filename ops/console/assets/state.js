/** What the page shows: view, its parameters, pool, position and window. The address bar holds all of it. */
import { batch, computed, effect, signal } from './library.js';

export const DEFAULT_WINDOW = 300;
export const WINDOWS = [60, 300, 900, 3600, 14_400];

/** The name of the view that is shown. */
export const view = signal('overview');
/** The parameters of the view: filters, identifiers. */
export const parameters = signal({});
/** The pool whose log is read. */
export const pool = signal('');
/** Length of the charts' window before the position, in seconds. */
export const windowSeconds = signal(DEFAULT_WINDOW);
/** Whether the newest position is followed. */
export const live = signal(true);
/** The position that a person has chosen; counts while `live` is false. */
export const chosen = signal(null);

/** The answer of /api/pools, and of /api/log for this pool. */
export const site = signal(null);
export const log = signal(null);
/** "connecting", "following", "lost", or "file" where the log cannot grow. */
export const connection = signal('connecting');
/** Whether the server wants a token. */
export const tokenWanted = signal(false);
/** Whether the log is played, and how many seconds of it in a second. */
export const playing = signal(false);
export const speed = signal(1);
/** The time of a position, as the latest answer told it. */
export const moment = signal({ position: null, time: null });
/** Short text for the status line; read out once. */
export const message = signal('');
/** Requests to the server that have no answer yet. */
export const pending = signal(0);

/** The position that every view shows. */
export const position = computed(() => (live.value ? newest(log.value) : chosen.value));

/** Whether a scope is granted to this reader. */
export function allowed(scope) {
  return Boolean(site.value?.scopes?.includes(scope));
}

/** The newest position that can be shown: history may be some messages behind the log. */
export function newest(state) {
  if (!state) return null;
  return state.indexed ?? state.last;
}

/** Keeps a position within the log. */
export function within(state, wanted) {
  if (!state) return wanted;
  return Math.max(state.first, Math.min(state.last, Math.round(wanted)));
}

/** The address of a view; `at` null is live, absent is what is shown now. */
export function address(name, values = {}, { at } = {}) {
  const query = new URLSearchParams();
  if (pool.value) query.set('pool', pool.value);
  const fixed = at === undefined ? (live.value ? null : chosen.value) : at;
  if (fixed !== null && fixed !== undefined) query.set('at', String(fixed));
  if (windowSeconds.value !== DEFAULT_WINDOW) query.set('window', String(windowSeconds.value));
  for (const [key, value] of Object.entries(values)) {
    if (value !== '' && value !== null && value !== undefined) query.set(key, String(value));
  }
  return `#/${name}?${query}`;
}

/** The whole link to what is shown, with its position. */
export function permanentLink() {
  const { origin, pathname } = window.location;
  return origin + pathname + address(view.value, parameters.value, { at: position.value });
}

let replaceTimer = 0;

/** Writes the address: "push" makes a step of the history, "replace" does not, and is delayed so that dragging costs nothing. */
function writeAddress(how) {
  clearTimeout(replaceTimer);
  if (how === 'push') {
    const wanted = address(view.value, parameters.value);
    if (wanted !== window.location.hash) window.history.pushState(null, '', wanted);
    return;
  }
  replaceTimer = setTimeout(() => window.history.replaceState(null, '', address(view.value, parameters.value)), 150);
}

/** Reads the address bar into the state. */
export function readAddress() {
  clearTimeout(replaceTimer);
  const [path, search = ''] = window.location.hash.replace(/^#\/?/, '').split('?');
  const query = new URLSearchParams(search);
  const at = /^\d+$/.test(query.get('at') ?? '') ? Number(query.get('at')) : null;
  const seconds = Number(query.get('window'));
  batch(() => {
    view.value = path || 'overview';
    if (query.get('pool')) pool.value = query.get('pool');
    live.value = at === null;
    if (at !== null) chosen.value = at;
    windowSeconds.value = seconds > 0 ? seconds : DEFAULT_WINDOW;
    for (const key of ['pool', 'at', 'window']) query.delete(key);
    parameters.value = Object.fromEntries(query);
  });
}

/** Shows a view with these parameters. */
export function show(name, values = {}, how = 'push') {
  batch(() => {
    view.value = name;
    parameters.value = present(values);
  });
  writeAddress(how);
}

/** Changes some parameters of the view; an empty value removes one. */
export function adjust(values, how = 'push') {
  parameters.value = present({ ...parameters.value, ...values });
  writeAddress(how);
}

function present(values) {
  return Object.fromEntries(Object.entries(values).filter(([, value]) => value !== '' && value !== null && value !== undefined));
}

/** Goes to a position and stops following. */
export function goTo(wanted, how = 'push') {
  batch(() => {
    chosen.value = within(log.value, wanted);
    live.value = false;
  });
  writeAddress(how);
}

/** Follows the newest position. */
export function goLive() {
  batch(() => {
    playing.value = false;
    live.value = true;
  });
  writeAddress('push');
}

/** Changes the length of the window. */
export function setWindow(seconds) {
  windowSeconds.value = seconds;
  writeAddress('replace');
}

/** Changes the pool: positions of another log mean nothing in this one. */
export function setPool(name) {
  batch(() => {
    pool.value = name;
    log.value = null;
    live.value = true;
    chosen.value = null;
    moment.value = { position: null, time: null };
    view.value = ['request', 'decision'].includes(view.value) ? 'overview' : view.value;
    parameters.value = {};
  });
  writeAddress('push');
}

/** Remembers when a position was stored. */
export function learnTime(answer) {
  if (answer && answer.position !== undefined && typeof answer.time_ms === 'number') {
    moment.value = { position: answer.position, time: answer.time_ms };
  }
}

const THEME = 'headwater-console-theme';

/** "auto", "light" or "dark". */
export const theme = signal(stored(THEME) || 'auto');
const systemDark = window.matchMedia('(prefers-color-scheme: dark)');
/** Whether colours are those of a dark page. */
export const dark = signal(false);

function applyTheme() {
  dark.value = theme.value === 'dark' || (theme.value === 'auto' && systemDark.matches);
  document.documentElement.dataset.theme = dark.value ? 'dark' : 'light';
}

/** Chooses the colours, and remembers the choice. */
export function setTheme(name) {
  theme.value = name;
  try {
    window.localStorage.setItem(THEME, name);
  } catch {
    // Storage may be forbidden: the choice then lasts as long as the page.
  }
}

function stored(key) {
  try {
    return window.localStorage.getItem(key);
  } catch {
    return null;
  }
}

systemDark.addEventListener('change', applyTheme);
effect(applyTheme);
window.addEventListener('popstate', readAddress);
