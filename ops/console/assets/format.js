/** Numbers, durations and times as text. Unknown values are a dash. */

export const UNKNOWN = '–';

const whole = new Intl.NumberFormat('en-US', { maximumFractionDigits: 0 });
const clock = new Intl.DateTimeFormat('en-GB', { hour: '2-digit', minute: '2-digit', second: '2-digit' });
const day = new Intl.DateTimeFormat('en-CA', { year: 'numeric', month: '2-digit', day: '2-digit' });

/** Says whether a value is a number that can be shown. */
export function isNumber(value) {
  return typeof value === 'number' && Number.isFinite(value);
}

/** A number with at most three significant digits after the thousands. */
export function number(value) {
  if (!isNumber(value)) return UNKNOWN;
  const size = Math.abs(value);
  if (Number.isInteger(value) || size >= 1000) return whole.format(value);
  if (size >= 100) return value.toFixed(0);
  if (size >= 10) return value.toFixed(1);
  return size >= 0.01 ? value.toFixed(2) : value === 0 ? '0' : value.toPrecision(2);
}

/** A whole number with thousands separators. */
export function integer(value) {
  return isNumber(value) ? whole.format(value) : UNKNOWN;
}

/** A large number with a suffix, for axes and tiles. */
export function compact(value) {
  if (!isNumber(value)) return UNKNOWN;
  const size = Math.abs(value);
  if (size >= 1e9) return `${trimmed(value / 1e9)}G`;
  if (size >= 1e6) return `${trimmed(value / 1e6)}M`;
  if (size >= 1e4) return `${trimmed(value / 1e3)}k`;
  return number(value);
}

function trimmed(value) {
  return value.toFixed(Math.abs(value) >= 100 ? 0 : 1).replace(/\.0$/, '');
}

/** A share between 0 and 1 in per cent. */
export function percent(value) {
  if (!isNumber(value)) return UNKNOWN;
  const shown = value * 100;
  return `${shown !== 0 && Math.abs(shown) < 10 ? shown.toFixed(1) : shown.toFixed(0)} %`;
}

/** A duration in milliseconds with the unit that suits it. */
export function duration(milliseconds) {
  if (!isNumber(milliseconds)) return UNKNOWN;
  const size = Math.abs(milliseconds);
  if (size < 1000) return `${number(size < 10 ? milliseconds : Math.round(milliseconds))} ms`;
  if (size < 60_000) return `${(milliseconds / 1000).toFixed(size < 10_000 ? 2 : 1)} s`;
  if (size < 3_600_000) return `${Math.floor(milliseconds / 60_000)} min ${Math.round((milliseconds % 60_000) / 1000)} s`;
  return `${Math.floor(milliseconds / 3_600_000)} h ${Math.round((milliseconds % 3_600_000) / 60_000)} min`;
}

/** The time of day of the reader's zone, to the second. */
export function time(milliseconds) {
  return isNumber(milliseconds) ? clock.format(milliseconds) : UNKNOWN;
}

/** The time of day to the millisecond. */
export function preciseTime(milliseconds) {
  if (!isNumber(milliseconds)) return UNKNOWN;
  return `${clock.format(milliseconds)}.${String(Math.floor(milliseconds % 1000)).padStart(3, '0')}`;
}

/** Date and time of the reader's zone. */
export function dateTime(milliseconds) {
  return isNumber(milliseconds) ? `${day.format(milliseconds)} ${clock.format(milliseconds)}` : UNKNOWN;
}

/** The same moment in UTC, for titles: two readers may be in different zones. */
export function utc(milliseconds) {
  return isNumber(milliseconds) ? new Date(milliseconds).toISOString() : '';
}

/** A value with its unit as the API names it. */
export function withUnit(value, unit) {
  if (!isNumber(value)) return UNKNOWN;
  if (unit === 'ms') return duration(value);
  if (unit === 'share') return percent(value);
  return unit ? `${compact(value)} ${unit}` : compact(value);
}

/** An identifier whose middle is left out when it is long. */
export function shortened(identifier, length = 22) {
  if (!identifier || identifier.length <= length) return identifier || UNKNOWN;
  const tail = Math.floor((length - 1) / 2);
  return `${identifier.slice(0, length - 1 - tail)}…${identifier.slice(-tail)}`;
}

/** Any field of an event as text. */
export function anything(value) {
  if (value === null || value === undefined || value === '') return UNKNOWN;
  if (typeof value === 'number') return Number.isInteger(value) ? integer(value) : number(value);
  if (typeof value === 'boolean') return value ? 'yes' : 'no';
  if (typeof value === 'string') return value;
  if (Array.isArray(value) && value.every((item) => typeof item === 'string')) return value.join(', ') || UNKNOWN;
  return JSON.stringify(value);
}
