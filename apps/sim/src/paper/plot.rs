//! Line charts in panels, as plain SVG: no dependency, a few kilobytes a figure.

use std::fmt::Write as _;

/// One line.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    pub name: String,
    /// Ascending in x, or in the order of a curve's parameter.
    pub points: Vec<(f64, f64)>,
}

/// One chart.
#[derive(Clone, Debug, PartialEq)]
pub struct Panel {
    pub title: String,
    pub x_label: String,
    pub y_label: String,
    /// Decades instead of equal steps.
    pub log_x: bool,
    pub log_y: bool,
    pub series: Vec<Series>,
}

const WIDTH: f64 = 300.0;
const HEIGHT: f64 = 230.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 30.0;
const BOTTOM: f64 = 44.0;
const HEADER: f64 = 52.0;
/// Distinguishable also by the colour-blind (Okabe and Ito).
const COLOURS: [&str; 6] = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"];
const DASHES: [&str; 6] = ["", "6 3", "2 3", "8 3 2 3", "4 4", "1 2"];

/// A figure of panels, `columns` in a row, with one legend.
#[must_use]
pub fn figure(title: &str, panels: &[Panel], columns: usize) -> String {
    let columns = columns.clamp(1, panels.len().max(1));
    let rows = panels.len().div_ceil(columns);
    let (w, h) = (WIDTH * as_f64(columns), HEADER + HEIGHT * as_f64(rows));
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {w} {h}\" width=\"{w}\" height=\"{h}\" \
         font-family=\"sans-serif\" font-size=\"10\">\n<rect width=\"{w}\" height=\"{h}\" fill=\"white\"/>\n"
    );
    let _ = writeln!(svg, "<text x=\"10\" y=\"18\" font-size=\"13\" font-weight=\"bold\">{}</text>", escape(title));
    let mut names: Vec<&str> = Vec::new();
    for name in panels.iter().flat_map(|p| &p.series).map(|s| s.name.as_str()) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    legend(&mut svg, &names);
    for (at, panel) in panels.iter().enumerate() {
        let (x, y) = (WIDTH * as_f64(at % columns), HEADER + HEIGHT * as_f64(at / columns));
        let _ = writeln!(svg, "<g transform=\"translate({x} {y})\">");
        draw(&mut svg, panel, &names);
        svg.push_str("</g>\n");
    }
    svg.push_str("</svg>\n");
    svg
}

fn as_f64(n: usize) -> f64 {
    f64::from(u32::try_from(n).unwrap_or(u32::MAX))
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn style(index: usize) -> (&'static str, &'static str) {
    (COLOURS[index % COLOURS.len()], DASHES[index % DASHES.len()])
}

fn legend(svg: &mut String, names: &[&str]) {
    let mut x = 10.0;
    for (at, name) in names.iter().enumerate() {
        let (colour, dash) = style(at);
        let _ = writeln!(
            svg,
            "<line x1=\"{x}\" y1=\"36\" x2=\"{}\" y2=\"36\" stroke=\"{colour}\" stroke-width=\"2\" \
             stroke-dasharray=\"{dash}\"/><text x=\"{}\" y=\"40\">{}</text>",
            x + 24.0,
            x + 28.0,
            escape(name)
        );
        x += 44.0 + 6.0 * as_f64(name.len());
    }
}

/// A scale from values to a span of pixels.
struct Scale {
    low: f64,
    high: f64,
    log: bool,
    from: f64,
    to: f64,
}

impl Scale {
    fn new(values: impl Iterator<Item = f64>, log: bool, from: f64, to: f64) -> Self {
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for v in values.filter(|v| v.is_finite() && (!log || *v > 0.0)) {
            (low, high) = (low.min(v), high.max(v));
        }
        if !low.is_finite() {
            (low, high) = (if log { 0.1 } else { 0.0 }, 1.0);
        }
        if log {
            (low, high) = (10_f64.powf(low.log10().floor()), 10_f64.powf(high.log10().ceil()));
            if low >= high {
                high = low * 10.0;
            }
        } else {
            low = low.min(0.0);
            high = if high <= low { low + 1.0 } else { high + (high - low) * 0.05 };
        }
        Self { low, high, log, from, to }
    }

    fn at(&self, v: f64) -> f64 {
        let (low, high, v) = if self.log {
            (self.low.log10(), self.high.log10(), v.max(self.low).log10())
        } else {
            (self.low, self.high, v)
        };
        self.from + (v - low) / (high - low) * (self.to - self.from)
    }

    fn ticks(&self) -> Vec<f64> {
        if self.log {
            let mut ticks = Vec::new();
            let mut t = self.low;
            while t <= self.high * 1.001 {
                ticks.push(t);
                t *= 10.0;
            }
            return ticks;
        }
        let raw = (self.high - self.low) / 4.0;
        let decade = 10_f64.powf(raw.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * decade).find(|s| *s >= raw).unwrap_or(raw);
        let mut ticks = Vec::new();
        let mut t = (self.low / step).ceil() * step;
        while t <= self.high {
            ticks.push(t);
            t += step;
        }
        ticks
    }
}

/// A number in few characters.
fn short(v: f64) -> String {
    let a = v.abs();
    let trim = |s: String| if s.contains('.') { s.trim_end_matches('0').trim_end_matches('.').to_owned() } else { s };
    if a >= 1e6 {
        format!("{}M", trim(format!("{:.2}", v / 1e6)))
    } else if a >= 1e3 {
        format!("{}k", trim(format!("{:.1}", v / 1e3)))
    } else if a >= 1.0 || v == 0.0 {
        trim(format!("{v:.2}"))
    } else {
        trim(format!("{v:.4}"))
    }
}

fn draw(svg: &mut String, panel: &Panel, names: &[&str]) {
    let points = || panel.series.iter().flat_map(|s| &s.points);
    let xs = Scale::new(points().map(|p| p.0), panel.log_x, LEFT, WIDTH - RIGHT);
    let ys = Scale::new(points().map(|p| p.1), panel.log_y, HEIGHT - BOTTOM, TOP);
    let middle = f64::midpoint(LEFT, WIDTH - RIGHT);
    let _ = writeln!(
        svg,
        "<text x=\"{middle}\" y=\"18\" text-anchor=\"middle\" font-size=\"11\">{}</text>",
        escape(&panel.title)
    );
    for t in ys.ticks() {
        let y = ys.at(t);
        let _ = writeln!(
            svg,
            "<line x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{}\" y2=\"{y:.1}\" stroke=\"#ddd\"/><text x=\"{}\" y=\"{:.1}\" \
             text-anchor=\"end\">{}</text>",
            WIDTH - RIGHT,
            LEFT - 5.0,
            y + 3.0,
            short(t)
        );
    }
    for t in xs.ticks() {
        let (x, y) = (xs.at(t), HEIGHT - BOTTOM);
        let _ = writeln!(
            svg,
            "<line x1=\"{x:.1}\" y1=\"{y}\" x2=\"{x:.1}\" y2=\"{}\" stroke=\"#444\"/><text x=\"{x:.1}\" y=\"{}\" \
             text-anchor=\"middle\">{}</text>",
            y + 4.0,
            y + 15.0,
            short(t)
        );
    }
    let _ = writeln!(
        svg,
        "<polyline points=\"{LEFT},{TOP} {LEFT},{0} {1},{0}\" fill=\"none\" stroke=\"#444\"/>\
         <text x=\"{middle}\" y=\"{2}\" text-anchor=\"middle\">{3}</text>\
         <text transform=\"translate(12 {4}) rotate(-90)\" text-anchor=\"middle\">{5}</text>",
        HEIGHT - BOTTOM,
        WIDTH - RIGHT,
        HEIGHT - 14.0,
        escape(&panel.x_label),
        f64::midpoint(TOP, HEIGHT - BOTTOM),
        escape(&panel.y_label),
    );
    for series in &panel.series {
        let (colour, dash) = style(names.iter().position(|n| *n == series.name).unwrap_or(0));
        let shown = series.points.iter().filter(|p| p.1.is_finite() && (!panel.log_y || p.1 > 0.0));
        let path: Vec<String> = shown.clone().map(|p| format!("{:.1},{:.1}", xs.at(p.0), ys.at(p.1))).collect();
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.8\" stroke-dasharray=\"{dash}\"/>",
            path.join(" ")
        );
        // A long series is a line, a short one has its points marked.
        for p in shown.filter(|_| series.points.len() <= 24) {
            let _ =
                write!(svg, "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"2.4\" fill=\"{colour}\"/>", xs.at(p.0), ys.at(p.1));
        }
        svg.push('\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_has_its_panels_points_and_one_legend() {
        let series = |name: &str, n: u32| Series {
            name: name.to_owned(),
            points: (0..n).map(|i| (f64::from(i), f64::from(i * i))).collect(),
        };
        let panel = |title: &str, log_y| Panel {
            title: title.to_owned(),
            x_label: "x".to_owned(),
            y_label: "y".to_owned(),
            log_x: false,
            log_y,
            series: vec![series("a & b", 5), series("c", 3)],
        };
        let svg = figure("two < three", &[panel("one", false), panel("two", true)], 2);
        assert_eq!(svg.matches("<g transform").count(), 2);
        assert_eq!(svg.matches("a &amp; b").count(), 1, "one legend");
        // Five and three points; on the logarithmic panel the zeros have no place.
        assert_eq!(svg.matches("<circle").count(), 8 + 6);
        assert!(svg.contains("two &lt; three") && svg.ends_with("</svg>\n"));
        assert_eq!([short(1234.0), short(0.05), short(2e6), short(12.5)], ["1.2k", "0.05", "2M", "12.5"]);
    }
}
