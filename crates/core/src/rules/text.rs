//! Formats conditions in the notation of the rules file, to inspect a running server.

use std::fmt;

use super::{Condition, Days, Pattern, Schedule, When, pattern::Kind};

/// Writes conditions such as `{path: /api/**, time: [22:00-06:00], zone: Europe/Berlin}`. `{}`
/// always holds.
impl fmt::Display for When {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("{")?;
        joined(f, self.iter())?;
        if let Some(schedule) = self.schedule() {
            let comma = if self.iter().len() > 0 { ", " } else { "" };
            write!(f, "{comma}{schedule}")?;
        }
        f.write_str("}")
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.hours().is_empty() {
            f.write_str("time: [")?;
            joined(f, self.hours())?;
            f.write_str("], ")?;
        }
        if self.days() != Days::ALL {
            f.write_str("days: [")?;
            joined(f, self.days().names())?;
            f.write_str("], ")?;
        }
        write!(f, "zone: {}", self.zone_name())
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", Word(self.entry()), self.pattern())
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind() {
            Kind::Exact(text) => Word(text).fmt(f),
            Kind::Glob(glob) => Word(&glob.to_string()).fmt(f),
            Kind::Regex(regex) => write!(f, "{{regex: {:?}}}", regex.as_str()),
            Kind::Nets(nets) => {
                f.write_str("{cidr: [")?;
                joined(f, nets.iter())?;
                f.write_str("]}")
            }
            Kind::Route(route) => write!(f, "{{route: {}}}", Word(route.as_str())),
            Kind::Present => f.write_str("{present: true}"),
            Kind::Any(any) => {
                let others = any.others();
                let mut exact: Vec<Word<'_>> = any.exact().map(|text| Word(text)).collect();
                exact.sort_unstable();
                f.write_str("[")?;
                joined(f, &exact)?;
                if !exact.is_empty() && !others.is_empty() {
                    f.write_str(", ")?;
                }
                joined(f, others)?;
                f.write_str("]")
            }
            Kind::All(patterns) => {
                f.write_str("{all: [")?;
                joined(f, patterns)?;
                f.write_str("]}")
            }
            Kind::Not(pattern) if matches!(pattern.kind(), Kind::Present) => {
                f.write_str("{present: false}")
            }
            Kind::Not(pattern) => write!(f, "{{not: {pattern}}}"),
        }
    }
}

/// A text, written in quotes if it could otherwise be misread.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Word<'t>(&'t str);

impl fmt::Display for Word<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/_-.*".contains(&byte);
        if !self.0.is_empty() && self.0.bytes().all(is_plain) {
            f.write_str(self.0)
        } else {
            write!(f, "{:?}", self.0)
        }
    }
}

fn joined<T: fmt::Display>(
    f: &mut fmt::Formatter<'_>,
    items: impl IntoIterator<Item = T>,
) -> fmt::Result {
    for (at, item) in items.into_iter().enumerate() {
        if at > 0 {
            f.write_str(", ")?;
        }
        item.fmt(f)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::Hours;

    #[test]
    fn conditions_are_printed_as_they_were_written() {
        let text = |text: &str| Pattern::text(text).unwrap();
        let condition = |entry: &str, pattern| Condition::new(entry, pattern).unwrap();
        let when = When::all(vec![
            condition("path", text("/api/**")),
            condition("header.x", text("a*b/*")),
            condition("file", text("/a/*/b**")),
            condition(
                "method",
                Pattern::any_of(vec![text("PUT"), text("GET"), text("P*")]).unwrap(),
            ),
            condition("ip", Pattern::networks(&["10.0.0.0/8"]).unwrap().negated()),
            condition("agent", Pattern::regex("bot|spider").unwrap()),
            condition("user", Pattern::absent()),
            condition("two words", text("a, b")),
        ]);
        let expected = "{path: /api/**, header.x: a*b/*, file: /a/*/b**, method: [GET, PUT, P*], \
            ip: {not: {cidr: [10.0.0.0/8]}}, agent: {regex: \"bot|spider\"}, user: {present: false}, \
            \"two words\": \"a, b\"}";
        assert_eq!(when.to_string(), expected);
        assert_eq!(When::default().to_string(), "{}");
        let hours = vec![Hours::parse("22:00-06:00").unwrap()];
        let schedule = Schedule::new(hours, Days::parse("sat-sun").unwrap(), "Europe/Berlin");
        let nights = When::default().during(schedule.unwrap());
        let expected = "{time: [22:00-06:00], days: [sat, sun], zone: Europe/Berlin}";
        assert_eq!(nights.to_string(), expected);
    }
}
