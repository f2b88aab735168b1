// The figures of Workbench in a page of JupyterLab: dark in a dark theme, and interactive once they are seen.
//
// A saved figure holds a PNG, which Plotly's renderer shows until the pointer enters it. Therefore a figure that arrives
// in a hidden tab is right there; plotly.js would draw it 0 pixels high.
import {addStyle} from './drawing.js';

const PAPER = '254, 255, 255';  // `theme.PAPER`, which figures of other libraries do not have

// Lightness is inverted and hues are kept. The paper is transparent, and blending replaces what else has its colour by the
// background of the notebook (in the active cell there is nothing to blend with). What has text on its colour, or stands for
// a value, is inverted back.
const DARK = '[data-jp-theme-light="false"]';
const FIGURE = `.svg-container:has(> .main-svg[style*="rgb(${PAPER})"])`;
const KEPT = ['.barlayer', '.bartext-outside', 'path.legendundefined'];  // Plotly's class of a bar's key in a legend
const HEAT_MAP = `${FIGURE}:has(.heatmaplayer image, .parcoords)`;  // and parallel coordinates, whose lines have its colours
const KEPT_OF_HEAT_MAP = ['.heatmaplayer', '.gl-container', '.cbfills', '.shapelayer'];
const all = (figure, parts) => [figure, ...parts.map(part => `${figure} ${part}`)].map(part => `${DARK} ${part}`).join(', ');
const ARRIVED = 'workbench-figure-arrived';
const STYLE = `
@keyframes ${ARRIVED} { from { outline-color: transparent; } }
.jp-RenderedPlotly > img { animation: ${ARRIVED} 1ms; }
img.workbench-figure { max-width: 100%; height: auto; }
${DARK} ${FIGURE}, ${DARK} img.workbench-figure { mix-blend-mode: lighten; }
${DARK} ${FIGURE} > .main-svg { background: transparent !important; }
${DARK} ${FIGURE} .bglayer .bg { fill-opacity: 0 !important; }
/* inverted, a pale grid and the pale colour of a chosen button would be darker than the page */
${DARK} ${FIGURE} .gridlayer path { stroke: #c8c8c8 !important; }
${DARK} ${FIGURE} .updatemenu-item-rect[style*="244, 250, 255"] { fill: #c0c0c0 !important; }
.heatmaplayer text[style*="rgb(68, 68, 68)"] { fill: #000 !important; }  /* plotly.js writes in this grey, which is too pale on green */
${DARK} ${FIGURE}:not(:has(.heatmaplayer image, .parcoords)) .legend > .bg { fill: #eee !important; }
${all(FIGURE, KEPT)}, ${DARK} img.workbench-figure { filter: invert(1) hue-rotate(180deg); }
${all(HEAT_MAP, KEPT_OF_HEAT_MAP)} { filter: invert(1); /* a rotation of hues cannot be undone for bright colours */ }`;

// Draws a figure that stays in view. One that is only scrolled past keeps its picture: drawing takes a tenth of a second,
// and JupyterLab would remove the figure while plotly.js still draws.
const STAYS_MS = 150;
const waits = new WeakMap();
const seen = new IntersectionObserver(entries => entries.forEach(({target, isIntersecting}) => {
  clearTimeout(waits.get(target));
  if (!isIntersecting) return;
  waits.set(target, setTimeout(() => {
    if (!target.isConnected) return;
    seen.unobserve(target);
    target.dispatchEvent(new MouseEvent('mouseenter'));  // which Plotly's renderer answers by drawing
  }, STAYS_MS));
}), {threshold: 0.1});

// Where a figure is removed all the same, plotly.js ends its drawing with an error about the figure that is gone.
const GONE = '_redrawFromAutoMarginCount';
const isOfGoneFigure = ({reason}) => reason instanceof TypeError && reason.message.includes(GONE);

// The words that a notebook stores beside a figure for those who cannot see it.
const words = (app, picture) => {
  for (const panel of app.shell.widgets('main')) {
    const area = panel.content?.widgets?.find?.(({node}) => node.contains(picture))?.outputArea;
    const at = area?.widgets.findIndex(({node}) => node.contains(picture)) ?? -1;
    if (at >= 0) return String(area.model.get(at).data['text/plain'] ?? '').split('\n')[0];
  }
  return '';
};

// Recognises a picture of a figure by the colour of its first pixel.
const recognise = (app, target) => {
  if (!target.matches?.('.jp-RenderedPlotly > img')) return;
  const canvas = Object.assign(document.createElement('canvas'), {width: 1, height: 1}).getContext('2d');
  canvas.drawImage(target, 0, 0);
  const known = Array.from(canvas.getImageData(0, 0, 1, 1).data).slice(0, 3).join(', ') === PAPER;
  target.classList.toggle('workbench-figure', known);
  if (!known) return;
  target.alt = words(app, target) || 'Figure';
  target.parentElement.setAttribute('role', 'figure');  // stays when the figure is drawn in the picture's place
  target.parentElement.setAttribute('aria-label', target.alt);
  seen.observe(target);
};

export default async function figures() {
  return {
    id: 'workbench:figures',
    autoStart: true,
    activate: app => {
      addStyle(STYLE);
      window.addEventListener('unhandledrejection', event => isOfGoneFigure(event) && event.preventDefault());
      document.addEventListener('load', ({target}) => recognise(app, target), true);  // an image's event does not bubble
      // A cell out of sight is rendered before it is on the page, which then hears nothing of its images' loading.
      document.addEventListener('animationstart', ({target, animationName}) => {
        if (animationName === ARRIVED && target.complete) recognise(app, target);
      });
    },
  };
}
