//! Figures of panels with line charts, as SVG ([`figure`]). Every line keeps its colour and dash in all panels of a
//! figure.
#![forbid(unsafe_code)]

use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, Ranged, ValueFormatter};
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::FontTransform;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// One line of a chart.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    pub name: String,
    /// Points, ascending in x or in the order of a curve's parameter.
    pub points: Vec<(f64, f64)>,
}

/// One chart.
#[derive(Clone, Debug, PartialEq)]
pub struct Panel {
    pub title: String,
    pub x_label: String,
    pub y_label: String,
    /// Logarithmic x axis. Points with x of 0 or less are left out.
    pub log_x: bool,
    pub log_y: bool,
    pub series: Vec<Series>,
}

/// The error that a figure could not be drawn: a bug, or no memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DrawError(String);

impl std::fmt::Display for DrawError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "drawing a figure: {}", self.0)
    }
}

impl std::error::Error for DrawError {}

impl<E: std::error::Error + Send + Sync> From<DrawingAreaErrorKind<E>> for DrawError {
    fn from(error: DrawingAreaErrorKind<E>) -> Self {
        Self(error.to_string())
    }
}

/// Pixels of a panel, of the title and a legend of one row above all of them, and of each further row.
const PANEL: (u32, u32) = (320, 240);
const HEADER: u32 = 48;
const LEGEND_ROW: u32 = 16;
/// Distinguishable also by the colour-blind (Okabe and Ito).
const COLOURS: [RGBColor; 6] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0xe6, 0x9f, 0x00),
    RGBColor(0x56, 0xb4, 0xe9),
];
/// Drawn and left out pixels of a line.
const DASHES: [(u32, u32); 6] = [(1, 0), (6, 3), (2, 3), (9, 3), (4, 4), (1, 2)];
/// Longest series whose points are marked; a longer one is a plain line.
const MARKED_MAX: usize = 24;

/// A figure of panels, `columns` in a row, with one legend: the text of an SVG file.
pub fn figure(title: &str, panels: &[Panel], columns: usize) -> Result<String, DrawError> {
    let columns = columns.clamp(1, panels.len().max(1));
    let rows = panels.len().div_ceil(columns);
    let pixels = |n: usize, each: u32| u32::try_from(n).map_or(u32::MAX, |n| n.saturating_mul(each));
    let mut names: Vec<&str> = Vec::new();
    for name in panels.iter().flat_map(|p| &p.series).map(|s| s.name.as_str()) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let width = pixels(columns, PANEL.0);
    let places = places(&names, width);
    let header_height = HEADER.saturating_add(LEGEND_ROW * places.last().map_or(0, |(_, row)| *row));
    let size = (width, header_height.saturating_add(pixels(rows, PANEL.1)));
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        root.fill(&WHITE)?;
        let (header, body) = root.split_vertically(header_height);
        header.draw(&Text::new(title.to_owned(), (10, 6), ("sans-serif", 15)))?;
        legend(&header, &names, &places)?;
        for (area, panel) in body.split_evenly((rows, columns)).iter().zip(panels) {
            let x = bounds(panel.series.iter().flat_map(|s| s.points.iter().map(|p| p.0)), panel.log_x);
            let y = bounds(panel.series.iter().flat_map(|s| s.points.iter().map(|p| p.1)), panel.log_y);
            match (panel.log_x, panel.log_y) {
                (false, false) => draw(area, panel, &names, x.0..x.1, y.0..y.1)?,
                (true, false) => draw(area, panel, &names, (x.0..x.1).log_scale(), y.0..y.1)?,
                (false, true) => draw(area, panel, &names, x.0..x.1, (y.0..y.1).log_scale())?,
                (true, true) => draw(area, panel, &names, (x.0..x.1).log_scale(), (y.0..y.1).log_scale())?,
            }
        }
        root.present()?;
    }
    Ok(svg)
}

/// Range of an axis: whole decades, or from zero (or below) to a little above the largest value.
fn bounds(values: impl Iterator<Item = f64>, log: bool) -> (f64, f64) {
    let shown = values.filter(|v| v.is_finite() && (!log || *v > 0.0));
    let (low, high) = shown.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
    match (low.is_finite(), log) {
        (false, true) => (0.1, 1.0),
        (false, false) => (0.0, 1.0),
        (true, true) => {
            let (low, high) = (low.log10().floor(), high.log10().ceil());
            (10_f64.powf(low), 10_f64.powf(high.max(low + 1.0)))
        }
        (true, false) => {
            let low = low.min(0.0);
            (low, if high > low { high + (high - low) * 0.05 } else { low + 1.0 })
        }
    }
}

fn style(index: usize) -> (ShapeStyle, (u32, u32)) {
    (COLOURS[index % COLOURS.len()].stroke_width(2), DASHES[index % DASHES.len()])
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Pixels before each name of a legend, and its row.
fn places(names: &[&str], width: u32) -> Vec<(u32, u32)> {
    let (mut x, mut row) = (10, 0);
    let place = |name: &&str| {
        let needed = 48 + 7 * u32::try_from(name.chars().count()).unwrap_or(u32::MAX / 16);
        if x > 10 && x + needed > width {
            (x, row) = (10, row + 1);
        }
        x += needed;
        (x - needed, row)
    };
    names.iter().map(place).collect()
}

fn legend(header: &Area<'_>, names: &[&str], places: &[(u32, u32)]) -> Result<(), DrawError> {
    for (at, (name, (x, row))) in names.iter().zip(places).enumerate() {
        let (line, (on, off)) = style(at);
        let pixel = |n: u32| i32::try_from(n).unwrap_or(i32::MAX);
        let (x, y) = (pixel(*x), pixel(LEGEND_ROW * row));
        let points = [(x, y + 36), (x + 26, y + 36)];
        match off {
            0 => header.draw(&PathElement::new(points, line))?,
            _ => header.draw(&DashedPathElement::new(points, on, off, line))?,
        }
        header.draw(&Text::new((*name).to_owned(), (x + 32, y + 30), ("sans-serif", 11)))?;
    }
    Ok(())
}

fn draw<X, Y>(area: &Area<'_>, panel: &Panel, names: &[&str], x: X, y: Y) -> Result<(), DrawError>
where
    X: AsRangedCoord<Value = f64>,
    Y: AsRangedCoord<Value = f64>,
    X::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
    Y::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    let centred = |size: u32| TextStyle::from(("sans-serif", size).into_font()).pos(Pos::new(HPos::Center, VPos::Top));
    let middle = |of: u32| i32::try_from(of / 2).unwrap_or(0);
    area.draw(&Text::new(panel.title.clone(), (middle(PANEL.0) + 20, 6), centred(13)))?;
    let turned = TextStyle::from(("sans-serif", 11).into_font().transform(FontTransform::Rotate270));
    area.draw(&Text::new(panel.y_label.clone(), (4, middle(PANEL.1)), turned.pos(Pos::new(HPos::Center, VPos::Top))))?;
    let mut chart = ChartBuilder::on(area)
        .margin_top(26)
        .margin_right(14)
        .margin_left(18)
        .x_label_area_size(36)
        .y_label_area_size(40)
        .build_cartesian_2d(x, y)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(RGBColor(0xdd, 0xdd, 0xdd))
        .x_labels(5)
        .y_labels(5)
        .x_desc(panel.x_label.clone())
        .x_label_formatter(&|v| short(*v))
        .y_label_formatter(&|v| short(*v))
        .axis_desc_style(("sans-serif", 11))
        .label_style(("sans-serif", 10))
        .draw()?;
    for series in &panel.series {
        let (line, (on, off)) = style(names.iter().position(|n| *n == series.name).unwrap_or(0));
        let on_axis = |v: f64, log: bool| v.is_finite() && (!log || v > 0.0);
        let shown = |p: &&(f64, f64)| on_axis(p.0, panel.log_x) && on_axis(p.1, panel.log_y);
        let points: Vec<(f64, f64)> = series.points.iter().filter(shown).copied().collect();
        if series.points.len() <= MARKED_MAX {
            chart.draw_series(points.iter().map(|p| Circle::new(*p, 3, line.color.filled())))?;
        }
        match off {
            0 => chart.draw_series(LineSeries::new(points, line))?,
            _ => chart.draw_series(DashedLineSeries::new(points, on, off, line))?,
        };
    }
    Ok(())
}

/// A number as a short text.
fn short(v: f64) -> String {
    let trim = |s: String| if s.contains('.') { s.trim_end_matches('0').trim_end_matches('.').to_owned() } else { s };
    match v.abs() {
        a if a >= 1e9 => format!("{}G", trim(format!("{:.2}", v / 1e9))),
        a if a >= 1e6 => format!("{}M", trim(format!("{:.2}", v / 1e6))),
        a if a >= 1e3 => format!("{}k", trim(format!("{:.1}", v / 1e3))),
        a if a >= 1.0 || v == 0.0 => trim(format!("{v:.2}")),
        _ => trim(format!("{v:.4}")),
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
        let svg = figure("two < three", &[panel("one", false), panel("two", true)], 2).unwrap();
        assert_eq!(svg.matches("a &amp; b").count(), 1, "one legend");
        // Five and three points; the logarithmic panel leaves out the zeros.
        assert_eq!(svg.matches("<circle").count(), 8 + 6);
        assert!(svg.contains("two &lt; three") && svg.trim_end().ends_with("</svg>"));
        assert_eq!([short(1234.0), short(0.05), short(2e6), short(12.5)], ["1.2k", "0.05", "2M", "12.5"]);
    }

    #[test]
    fn a_long_legend_has_several_rows() {
        let names = ["short", "a name of thirty characters...", "another one of thirty letters."];
        assert_eq!(places(&names, 640), [(10, 0), (93, 0), (351, 0)]);
        assert_eq!(places(&names, 400), [(10, 0), (93, 0), (10, 1)]);
        assert_eq!(places(&names, 10).last(), Some(&(10, 2)), "one a row at least");
    }

    #[test]
    fn nothing_to_show_is_an_empty_chart() {
        let panel = Panel {
            title: "none".to_owned(),
            x_label: String::new(),
            y_label: String::new(),
            log_x: true,
            log_y: false,
            series: vec![Series { name: "empty".to_owned(), points: vec![(-1.0, f64::NAN)] }],
        };
        assert!(figure("nothing", &[panel], 3).unwrap().contains("none"));
        assert!(figure("no panel", &[], 1).unwrap().contains("no panel"));
    }
}
