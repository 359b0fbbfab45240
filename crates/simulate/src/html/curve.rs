//! Line charts as inline SVG.

use std::fmt::Write as _;

use super::{BOTTOM, HEIGHT, LEFT, TOP, WIDTH, escaped};

/// The space to the right of the last point for its label, in pixels.
const RIGHT: u64 = 40;

/// The minimum distance between two labels on the horizontal axis, in pixels.
const LABEL_DISTANCE: u64 = 90;

/// The position of a point on the horizontal axis, and its label.
#[derive(Debug)]
pub(crate) struct Point {
    pub(crate) position: u64,
    pub(crate) label: String,
}

/// One curve. All curves of a chart use the same vertical axis.
#[derive(Debug)]
pub(crate) struct Series {
    pub(crate) name: &'static str,
    /// The vertical value at each point, and its description.
    pub(crate) values: Vec<(u64, String)>,
}

/// A chart with at most three curves.
#[derive(Debug)]
pub(crate) struct Curves<'c> {
    pub(crate) title: &'c str,
    pub(crate) horizontal: &'c str,
    pub(crate) vertical: &'c str,
    pub(crate) points: Vec<Point>,
    pub(crate) series: Vec<Series>,
    /// The value at the top of the vertical axis, and its label.
    pub(crate) top: (u64, String),
}

impl Curves<'_> {
    /// Draws the curves. Each curve has its own colour and dash pattern.
    pub(crate) fn draw(&self, out: &mut String) {
        let (title, bottom) = (escaped(self.title), HEIGHT - BOTTOM);
        let _ = write!(
            out,
            "<div class=\"chart\"><svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{title}\"><title>{title}</title>\n\
             <text x=\"0\" y=\"14\">{}</text>",
            escaped(self.vertical)
        );
        let mut left = LEFT + 200;
        for (at, series) in self.series.iter().enumerate() {
            let _ = write!(
                out,
                "<line class=\"curve c{at}\" x1=\"{left}\" y1=\"10\" x2=\"{}\" y2=\"10\"/><text x=\"{}\" y=\"14\">{}</text>",
                left + 24,
                left + 30,
                series.name
            );
            // A character is about 7 pixels wide.
            left += 60 + 7 * series.name.len() as u64;
        }
        for (at, series) in self.series.iter().enumerate() {
            self.curve(out, at, series);
        }
        let (top, middle) = (&self.top.1, LEFT + (WIDTH - LEFT) / 2);
        let _ = write!(
            out,
            "\n<line class=\"axis\" x1=\"{LEFT}\" y1=\"{bottom}\" x2=\"{WIDTH}\" y2=\"{bottom}\"/>\
             <line class=\"axis\" x1=\"{LEFT}\" y1=\"{TOP}\" x2=\"{LEFT}\" y2=\"{bottom}\"/>\
             <text x=\"{0}\" y=\"{1}\" text-anchor=\"end\">{top}</text>\
             <text x=\"{0}\" y=\"{bottom}\" text-anchor=\"end\">0</text>\
             <text x=\"{middle}\" y=\"{2}\" text-anchor=\"middle\">{3}</text>",
            LEFT - 6,
            TOP + 10,
            bottom + 36,
            escaped(self.horizontal)
        );
        self.labels(out);
        out.push_str("\n</svg></div>\n");
    }

    fn curve(&self, out: &mut String, number: usize, series: &Series) {
        let places = self.points.iter().zip(&series.values);
        let places = places.map(|(point, (value, text))| {
            (self.x(point.position), self.y(*value), &point.label, text)
        });
        let places: Vec<_> = places.collect();
        let line: Vec<String> = places.iter().map(|(x, y, ..)| format!("{x},{y}")).collect();
        let _ = write!(
            out,
            "\n<polyline class=\"curve c{number}\" points=\"{}\"/>",
            line.join(" ")
        );
        for (x, y, label, text) in places {
            let _ = write!(
                out,
                "<circle class=\"dot c{number}\" cx=\"{x}\" cy=\"{y}\" r=\"3.5\"><title>{}: {}, {}</title></circle>",
                escaped(label),
                series.name,
                escaped(text)
            );
        }
    }

    /// Labels the points, but omits labels that would overlap another label.
    fn labels(&self, out: &mut String) {
        let y = HEIGHT - BOTTOM + 16;
        let mut next = 0;
        for point in &self.points {
            let x = self.x(point.position);
            if x >= next {
                let label = escaped(&point.label);
                let _ = write!(
                    out,
                    "<text x=\"{x}\" y=\"{y}\" text-anchor=\"middle\">{label}</text>"
                );
                next = x + LABEL_DISTANCE;
            }
        }
    }

    /// Returns the horizontal position in pixels.
    fn x(&self, position: u64) -> u64 {
        let positions = self.points.iter().map(|point| point.position);
        let first = positions.clone().min().unwrap_or(0);
        let range = positions.max().unwrap_or(0).saturating_sub(first);
        let width = WIDTH - LEFT - 2 * RIGHT;
        if range == 0 {
            return LEFT + RIGHT + width / 2;
        }
        let offset = u128::from(position.saturating_sub(first)) * u128::from(width);
        LEFT + RIGHT + u64::try_from(offset / u128::from(range)).unwrap_or(width)
    }

    /// Returns the vertical position in pixels.
    fn y(&self, value: u64) -> u64 {
        let height = HEIGHT - BOTTOM - TOP;
        let scaled = u128::from(value) * u128::from(height) / u128::from(self.top.0.max(1));
        HEIGHT - BOTTOM - u64::try_from(scaled).unwrap_or(height).min(height)
    }
}

/// Returns the smallest number of the form 1, 2 or 5 times a power of ten that is at least `value`.
pub(crate) fn round_top(value: u64) -> u64 {
    let mut power = 1_u64;
    loop {
        for factor in [1, 2, 5] {
            let top = power.saturating_mul(factor);
            if top >= value {
                return top;
            }
        }
        power = power.saturating_mul(10);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_top_of_an_axis_is_a_round_number() {
        for (value, top) in [
            (0, 1),
            (1, 1),
            (3, 5),
            (11, 20),
            (100, 100),
            (u64::MAX, u64::MAX),
        ] {
            assert_eq!(round_top(value), top);
        }
    }

    #[test]
    fn curves_stay_within_the_chart_and_labels_do_not_overlap() {
        let points = [0, 1, 2, 1_000, u64::MAX].map(|position| Point {
            position,
            label: format!("<{position}>"),
        });
        let curves = Curves {
            title: "</svg></div><b>",
            horizontal: "limit",
            vertical: "denied",
            points: points.into(),
            series: vec![Series {
                name: "requests",
                values: [0, 5, 9, 10, 11]
                    .map(|value| (value, "<i>".to_owned()))
                    .into(),
            }],
            top: (10, "10".to_owned()),
        };
        let mut out = String::new();
        curves.draw(&mut out);
        assert!(!out.contains("<b>") && !out.contains("<i>"), "{out}");
        // The first four points are at the same position on this axis.
        assert_eq!(
            out.matches("text-anchor=\"middle\">&lt;").count(),
            2,
            "{out}"
        );
        let numbers = |attribute: &str| -> Vec<u64> {
            let start = format!(" {attribute}=\"");
            out.split(&start)
                .skip(1)
                .map(|part| part.split('"').next().unwrap().parse().unwrap())
                .collect()
        };
        assert!(
            numbers("cx").iter().all(|x| (LEFT..=WIDTH).contains(x)),
            "{out}"
        );
        assert!(
            numbers("cy")
                .iter()
                .all(|y| (TOP..=HEIGHT - BOTTOM).contains(y)),
            "{out}"
        );
    }
}
