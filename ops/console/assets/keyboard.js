/** Keys of the whole page. They do nothing while a person types, and none needs a modifier but the palette's. */
import { signal } from './library.js';
import { copyLink } from './slider.js';
import { step } from './moving.js';
import * as state from './state.js';

/** What is open above the page: "" , "palette" or "help". */
export const overlay = signal('');

/** Keys as the help shows them: [keys, what they do]. */
export const KEYS = [
  ['[ ]', 'Previous or next message of the log'],
  ['d D', 'Next or previous decision'],
  ['r R', 'Next or previous request'],
  ['f F', 'Next or previous fleet event: a worker joins, leaves or changes'],
  ['l', 'Follow the newest position'],
  ['p', 'Pause while live; play or stop otherwise'],
  ['c', 'Copy a link to this view at this position'],
  ['/', 'Go to the filter of the view'],
  ['← → Enter', 'In a chart or the lanes: move the cursor (Page keys, Home and End move further), and go to its time'],
  ['g', 'Then a letter: go to a view'],
  ['Ctrl K', 'Open the palette: views, workers, requests, positions, times'],
  ['?', 'Show this help'],
  ['Esc', 'Close what is open'],
];

const STEPS = {
  '[': ['message', -1], ']': ['message', 1], d: ['decision', 1], D: ['decision', -1], r: ['request', 1], R: ['request', -1], f: ['fleet', 1], F: ['fleet', -1],
};

function typing(target) {
  return target instanceof HTMLElement && target.closest('input:not([type="range"]):not([type="checkbox"]), textarea, select, [contenteditable]');
}

function focusFilter() {
  const field = document.querySelector('[data-filter]');
  field?.focus();
  field?.select?.();
}

function togglePlaying() {
  if (state.live.peek()) state.goTo(state.position.peek(), 'replace');
  else state.playing.value = !state.playing.peek();
}

const ACTIONS = {
  l: state.goLive,
  p: togglePlaying,
  c: copyLink,
  '/': focusFilter,
  '?': () => (overlay.value = 'help'),
};

/** Listens to the page's keys; `goToView(letter)` shows a view and says whether there is one. */
export function listen(goToView) {
  let prefixed = -Infinity;
  window.addEventListener('keydown', (event) => {
    if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === 'k') {
      event.preventDefault();
      overlay.value = overlay.peek() === 'palette' ? '' : 'palette';
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey || typing(event.target) || document.querySelector('dialog[open]')) return;
    if (event.key === 'Escape' && state.parameters.peek().panel) {
      state.adjust({ panel: '' });
      return;
    }
    const afterPrefix = performance.now() - prefixed < 1500;
    prefixed = -Infinity;
    if (afterPrefix && goToView(event.key)) event.preventDefault();
    else if (event.key === 'g') prefixed = performance.now();
    else act(event);
  });
}

function act(event) {
  const moves = STEPS[event.key];
  const action = ACTIONS[event.key];
  if (!moves && !action) return;
  event.preventDefault();
  if (moves) step(...moves);
  else action();
}
