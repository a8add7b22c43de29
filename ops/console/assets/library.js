/** The vendored libraries, bound together: templates, hooks, and signals that components can read. */
import { h, render } from './vendor/preact.js';
import { useEffect, useErrorBoundary, useId, useLayoutEffect, useMemo, useReducer, useRef, useState } from './vendor/preact-hooks.js';
import htm from './vendor/htm.js';
import { batch, computed, effect, signal, untracked } from './vendor/signals-core.js';

export const html = htm.bind(h);
export { batch, computed, effect, render, signal, untracked };
export { useEffect, useErrorBoundary, useId, useLayoutEffect, useMemo, useReducer, useRef, useState };

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

/**
 * A form of one field that shows a value and takes what is typed: the properties of both; `take` gets the text. While it has the focus the field
 * holds still, so that a value that changes meanwhile does not replace what is selected or typed. Enter counts also before that is rendered.
 */
export function useTyped(value, take) {
  const [held, setHeld] = useState(null);
  const typed = useRef(null);
  const hold = (text, shown) => {
    typed.current = text;
    setHeld(shown);
  };
  const field = {
    value: held ?? value,
    onFocus: (event) => {
      hold(null, event.currentTarget.value);
      event.currentTarget.select();
    },
    onInput: (event) => hold(event.currentTarget.value, event.currentTarget.value),
    onBlur: () => hold(null, null),
  };
  const onSubmit = (event) => {
    event.preventDefault();
    const text = typed.current;
    event.currentTarget.querySelector('input').blur();
    hold(null, null);
    if (text !== null) take(text);
  };
  return { form: { onSubmit }, field };
}

/** Joins the class names that are not empty. */
export function classes(...names) {
  return names.filter(Boolean).join(' ');
}
