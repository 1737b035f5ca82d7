// What the page's scripts share: elements by id, and figures as text.

export const at = (id) => document.getElementById(id);
export const show = (id, text) => { at(id).textContent = text; };

export const count = (value) => Math.round(value).toLocaleString("en");
export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1e-3) return `${(1e6 * value).toFixed(0)} µs`;
  if (value < 1) return `${(1e3 * value).toFixed(value < 0.1 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(1)} s`;
  return value < 7200 ? `${(value / 60).toFixed(0)} min` : `${(value / 3600).toFixed(1)} h`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit += 1) value /= 1024;
  return `${value < 10 && unit ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}
