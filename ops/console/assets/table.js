/** A table that draws only the rows in sight. Its markup stays that of a table. */
import { classes, html, useEffect, useLayoutEffect, useRef, useState } from './library.js';

const ROW_HEIGHT = 30;
/** Rows drawn above and below those in sight. */
const MARGIN = 12;
/** Tables up to this many rows are drawn whole, and grow with their rows. */
const WHOLE = 60;

/** The rows in sight of a scrolled element. */
function useRange(count, element) {
  const [range, setRange] = useState({ first: 0, last: WHOLE });
  const look = () => {
    const scrolled = element.current;
    if (!scrolled) return;
    const first = Math.max(0, Math.floor(scrolled.scrollTop / ROW_HEIGHT) - MARGIN);
    const last = Math.ceil((scrolled.scrollTop + scrolled.clientHeight) / ROW_HEIGHT) + MARGIN;
    setRange((before) => (before.first === first && before.last === last ? before : { first, last }));
  };
  useLayoutEffect(look, [count]);
  useEffect(() => {
    const watched = new ResizeObserver(look);
    watched.observe(element.current);
    return () => watched.disconnect();
  }, []);
  return [range, look];
}

function Heading({ column, sort, onSort }) {
  const sorted = column.sort && sort?.by === column.sort;
  const direction = sorted ? (sort.order === 'asc' ? 'ascending' : 'descending') : undefined;
  const label = html`${column.label}${column.unit ? html` <span class="unit">${column.unit}</span>` : null}`;
  const names = classes(column.align === 'right' && 'right', column.wide && 'wide-only');
  if (!column.sort) return html`<th scope="col" class=${names} title=${column.title}>${label}</th>`;
  const next = sorted && sort.order === 'desc' ? 'asc' : 'desc';
  const mark = sorted ? (sort.order === 'asc' ? '▲' : '▼') : '';
  return html`<th scope="col" class=${names} aria-sort=${direction} title=${column.title}>
    <button type="button" class="sort" onClick=${() => onSort(column.sort, next)}>${label}<span aria-hidden="true" class="sort-mark">${mark}</span></button>
  </th>`;
}

function Row({ row, index, columns, onOpen, selected }) {
  const opened = (event) => {
    if (onOpen && !event.target.closest('a, button, input, summary') && !window.getSelection().toString()) onOpen(row);
  };
  if (!row) return html`<tr aria-rowindex=${index + 2}><td colspan=${columns.length} class="placeholder">Loading row ${index + 1}</td></tr>`;
  return html`<tr aria-rowindex=${index + 2} class=${classes(onOpen && 'openable', selected && 'selected')} onClick=${opened}>
    ${columns.map((column) => html`<td key=${column.name} class=${classes(column.align === 'right' && 'right number', column.wide && 'wide-only', column.className)}>${column.render(row)}</td>`)}
  </tr>`;
}

/**
 * Columns are {name, label, unit, align, sort, wide, title, render(row)}. `rows` may begin at `offset` of `total`;
 * `onRange(first, last)` says which rows are in sight, and `onEnd` that the last one is.
 */
export function Table({ label, columns, rows, keyOf, total = rows.length, offset = 0, sort, onSort, onOpen, onRange, onEnd, isSelected, empty }) {
  const element = useRef();
  const [range, look] = useRange(total, element);
  const whole = total <= WHOLE;
  const first = whole ? 0 : Math.min(range.first, Math.max(0, total - 1));
  const last = whole ? total : Math.min(total, range.last);
  useEffect(() => {
    if (onRange && !whole) onRange(first, last);
    if (onEnd && !whole && last >= total) onEnd();
  }, [first, last, total]);
  const shown = [];
  for (let index = first; index < last; index += 1) shown.push(index);
  return html`<div class=${classes('table-scroll', !whole && 'table-virtual')} ref=${element} onScroll=${look} tabindex="0" role="region" aria-label=${label}>
    <table aria-label=${label} aria-rowcount=${total + 1}>
      <thead><tr aria-rowindex="1">${columns.map((column) => html`<${Heading} key=${column.name} column=${column} sort=${sort} onSort=${onSort} />`)}</tr></thead>
      <tbody>
        ${first > 0 ? html`<tr key="above" aria-hidden="true" class="spacer" style=${{ height: `${first * ROW_HEIGHT}px` }}><td colspan=${columns.length}></td></tr>` : null}
        ${shown.map((index) => {
          const row = rows[index - offset];
          return html`<${Row} key=${row ? keyOf(row) : `row ${index}`} row=${row} index=${index} columns=${columns} onOpen=${onOpen} selected=${row && isSelected?.(row)} />`;
        })}
        ${last < total ? html`<tr key="below" aria-hidden="true" class="spacer" style=${{ height: `${(total - last) * ROW_HEIGHT}px` }}><td colspan=${columns.length}></td></tr>` : null}
      </tbody>
    </table>
    ${total === 0 ? empty : null}
  </div>`;
}
