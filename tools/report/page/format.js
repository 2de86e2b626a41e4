"use strict";
// How numbers are written.

const grouped = (value) => value.toLocaleString("en-US", { maximumFractionDigits: 0 });

/** Four digits that count: 0.01234, 5.417, 1,234. */
function plain(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1000) return grouped(value);
  if (size < 1e-3) return value.toExponential(2);
  return value.toPrecision(4).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

/** A loss, always with the same number of digits, so that columns of them can be compared. */
const lossText = (value) => (Math.abs(value) < 1e-2 || Math.abs(value) >= 1000 ? plain(value) : value.toPrecision(4));

function scaled(value, base, units) {
  let unit = 0;
  for (; Math.abs(value) >= base && unit + 1 < units.length; ++unit) value /= base;
  const digits = unit === 0 || Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return value.toFixed(digits) + units[unit];
}

/** The same for round numbers: 40k, 1.5 GB. */
const rounded = (text) => text.replace(/\.0+(?=\D|$)/, "").replace(/(\.\d*?[1-9])0+(?=\D|$)/, "$1");


const compact = (value) => (Math.abs(value) < 10000 ? grouped(value) : scaled(value, 1000, ["", "k", "M", "G", "T"]));
const bytes = (value) => scaled(value, 1000, [" B", " kB", " MB", " GB", " TB"]);
const percent = (value) => (100 * value).toFixed(100 * value < 10 ? 1 : 0) + "%";

/** 4.2 s, 3 min 20 s, 1 h 12 min. */
function seconds(value) {
  if (value < 60) return (value < 10 ? Math.round(value * 10) / 10 : Math.round(value)) + " s";
  const whole = Math.round(value);
  if (whole < 3600) return Math.floor(whole / 60) + " min" + (whole % 60 ? " " + (whole % 60) + " s" : "");
  const minutes = Math.floor(whole / 60) % 60;
  return Math.floor(whole / 3600) + " h" + (minutes ? " " + minutes + " min" : "");
}

/** A time given in microseconds. */
function micros(value) {
  if (value < 1000) return plain(Math.round(value * 10) / 10) + " \u00b5s";
  if (value < 1e6) return (value / 1000).toFixed(value < 1e4 ? 2 : 1) + " ms";
  return (value / 1e6).toFixed(2) + " s";
}

const counted = (count, word) => grouped(count) + " " + word + (count === 1 ? "" : "s");
