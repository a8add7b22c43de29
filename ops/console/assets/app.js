/** The page: header, time bar, navigation, the view that is shown, and what lies above it. */
import { classes, effect, html, render, useEffect, useErrorBoundary, useLayoutEffect, useRef, useSignal, useState } from './library.js';
import { VIEWS, viewNamed } from './catalogue.js';
import { keepToken } from './api.js';
import { fleet, restart, start, startProblem } from './following.js';
import { listen, overlay } from './keyboard.js';
import { Dialog, Loading, Problem, Select } from './parts.js';
import { Overlay } from './palette.js';
import { TimeBar } from './slider.js';
import { WorkerPanel } from './worker.js';
import * as state from './state.js';

function PoolSelect() {
  const site = useSignal(state.site);
  const pool = useSignal(state.pool);
  if (!site || site.pools.length === 0) return null;
  const options = site.pools.map((one) => ({ value: one.pool, label: one.pool }));
  return html`<${Select} label="Pool" value=${pool} options=${options} onChange=${state.setPool} />`;
}

function ThemeButton() {
  const dark = useSignal(state.dark);
  const label = dark ? 'Use light colours' : 'Use dark colours';
  return html`<button type="button" class="icon-button" aria-label=${label} title=${label} onClick=${() => state.setTheme(dark ? 'light' : 'dark')}><span class="icon-theme" aria-hidden="true"></span></button>`;
}

function Header() {
  const site = useSignal(state.site);
  return html`<header class="top">
    <a class="brand" href=${state.address('overview')}><span class="brand-mark" aria-hidden="true"></span>Headwater<span class="brand-part"> console</span></a>
    <${PoolSelect} />
    ${site ? html`<span class="source muted" title=${`Version ${site.version}`}>${site.source}</span>` : null}
    <span class="top-space"></span>
    <button type="button" class="search-button" onClick=${() => (overlay.value = 'palette')}>Go to<kbd>Ctrl K</kbd></button>
    <button type="button" class="icon-button" aria-label="Show the keys" title="Show the keys (?)" onClick=${() => (overlay.value = 'help')}>?</button>
    <${ThemeButton} />
  </header>`;
}

function worst(findings) {
  if (findings.some((one) => one.severity === 'critical')) return 'critical';
  return findings.some((one) => one.severity === 'warning') ? 'warning' : '';
}

function NavigationLink({ one, current, findings }) {
  useSignal(state.live);
  useSignal(state.chosen);
  useSignal(state.windowSeconds);
  useSignal(state.pool);
  const severity = one.name === 'overview' ? worst(findings) : '';
  const count = findings.filter((finding) => finding.severity === severity).length;
  return html`<a href=${state.address(one.name)} aria-current=${current ? 'page' : undefined} title=${`${one.title} (g ${one.key})`}>
    <span class="nav-title">${one.title}</span>
    ${severity ? html`<span class=${`badge badge-${severity}`}>${count}<span class="visually-hidden"> ${severity} findings</span></span>` : null}
  </a>`;
}

function Navigation() {
  const name = useSignal(state.view);
  const findings = useSignal(fleet).data?.findings || [];
  const [open, setOpen] = useState(false);
  useEffect(() => setOpen(false), [name]);
  const shown = name === 'request' ? 'requests' : viewNamed(name).name;
  const views = VIEWS.filter((one) => !one.hidden);
  return html`<nav class=${classes('navigation', open && 'navigation-open')} aria-label="Views">
    <ul>${views.map((one) => html`<li key=${one.name} class=${one.main ? 'nav-main' : 'nav-more'}><${NavigationLink} one=${one} current=${one.name === shown} findings=${findings} /></li>`)}
      <li class="nav-menu"><button type="button" aria-expanded=${open} onClick=${() => setOpen(!open)}>${open ? 'Close' : 'More'}</button></li>
    </ul>
  </nav>`;
}

/** A failure of a view's code: the rest of the page goes on. */
function Guarded({ component, name }) {
  const [error, reset] = useErrorBoundary((cause) => console.error(cause));
  if (error) {
    return html`<section class="view"><h1 id="view-title" tabindex="-1">This view failed</h1>
      <p>${String(error.message || error)}</p><p>The other views work. Report this with the link to this moment.</p><button type="button" onClick=${reset}>Try again</button></section>`;
  }
  return html`<${component} key=${name} />`;
}

function Main() {
  const name = useSignal(state.view);
  const pool = useSignal(state.pool);
  const log = useSignal(state.log);
  const problem = useSignal(startProblem);
  const busy = useSignal(state.pending) > 0;
  const first = useRef(true);
  const shown = viewNamed(name);
  useLayoutEffect(() => {
    document.title = `${shown.title} · ${pool || 'Headwater'} · Headwater console`;
    if (first.current) first.current = false;
    else document.getElementById('view-title')?.focus({ preventScroll: true });
    document.getElementById('main')?.scrollTo(0, 0);
  }, [shown.name, pool]);
  let content = html`<${Guarded} component=${shown.component} name=${`${pool} ${shown.name}`} key=${`${pool} ${shown.name}`} />`;
  if (!log) {
    content = html`<section class="view"><h1 id="view-title" tabindex="-1">${shown.title}</h1>${problem ? html`<${Problem} error=${problem} retry=${restart} />` : html`<${Loading} />`}</section>`;
  }
  return html`<main id="main" class=${classes(busy && 'busy')} tabindex="-1">${content}</main>`;
}

function TokenDialog() {
  const wanted = useSignal(state.tokenWanted);
  if (!wanted) return null;
  const submitted = (event) => {
    event.preventDefault();
    const field = event.currentTarget.querySelector('input');
    keepToken(field.value.trim());
    restart();
  };
  return html`<${Dialog} label="Token" onClose=${() => {}} className="token">
    <form onSubmit=${submitted}>
      <h2>This console wants a token</h2>
      <p>Ask the operator of this fleet for one. It is kept until this tab is closed.</p>
      <label for="token-field">Token</label>
      <input id="token-field" type="password" autocomplete="off" required />
      <div class="actions"><button type="submit" class="primary">Continue</button></div>
    </form>
  <//>`;
}

/** The latest message: shown for some seconds, and read out. */
function Message() {
  const text = useSignal(state.message);
  useEffect(() => {
    if (!text) return undefined;
    const timer = setTimeout(() => (state.message.value = ''), 5000);
    return () => clearTimeout(timer);
  }, [text]);
  return html`<div class=${classes('message', text && 'message-shown')} role="status">${text}</div>`;
}

function Page() {
  return html`<a class="skip" href="#main" onClick=${(event) => {
    event.preventDefault();
    document.getElementById('main').focus();
  }}>Skip to the view</a>
    <${Header} /><${TimeBar} /><${Navigation} /><${Main} /><${WorkerPanel} /><${Overlay} /><${TokenDialog} /><${Message} />`;
}

function goToView(letter) {
  const found = VIEWS.find((one) => one.key === letter);
  if (!found) return false;
  const same = state.view.peek() === found.name;
  state.show(found.name);
  if (same) document.getElementById('view-title')?.focus({ preventScroll: true });
  return true;
}

/** An address without a pool or view is completed once they are known, so that a copy of it means the same. */
effect(() => {
  if (state.pool.value && state.log.value && !window.location.hash.includes('pool=')) {
    window.history.replaceState(null, '', state.address(state.view.peek(), state.parameters.peek()));
  }
});

state.readAddress();
listen(goToView);
render(html`<${Page} />`, document.getElementById('page'));
start();
