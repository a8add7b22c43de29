/** The vendored libraries, bound together: templates, hooks, and signals that components can read. */
import { h, render, Fragment } from './vendor/preact.js';
import { useCallback, useEffect, useErrorBoundary, useId, useLayoutEffect, useMemo, useReducer, useRef, useState } from './vendor/preact-hooks.js';
import htm from './vendor/htm.js';
import { batch, computed, effect, signal, untracked } from './vendor/signals-core.js';

export const html = htm.bind(h);
export { Fragment, batch, computed, effect, h, render, signal, untracked };
export { useCallback, useEffect, useErrorBoundary, useId, useLayoutEffect, useMemo, useReducer, useRef, useState };

/** Returns the signal's value; the component is rendered again when it changes. */
export function useSignal(source) {
  const [, renderAgain] = useReducer((count) => count + 1, 0);
  const shown = useRef();
  shown.current = source.peek();
  useEffect(
    () =>
      effect(() => {
        if (source.value !== shown.current) renderAgain();
      }),
    [source],
  );
  return shown.current;
}

/** What is typed into a field that else shows a value: `typed` as rendered, `latest.current` also where Enter comes before that is rendered. */
export function useTyped() {
  const [typed, setTyped] = useState(null);
  const latest = useRef(null);
  const type = (text) => {
    latest.current = text;
    setTyped(text);
  };
  return { typed, latest, type };
}

/** Joins the class names that are not empty. */
export function classes(...names) {
  return names.filter(Boolean).join(' ');
}
