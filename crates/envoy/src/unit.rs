//! Units of time in Envoy's rate limit service.

use tidegate_core::{Algorithm, Limit, Span, Window};

/// The window length of a limit. Windows are aligned to multiples of the unit since the Unix epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Unit {
    /// A window of a different length, or no window.
    #[default]
    Unknown,
    /// A window of 1 second.
    Second,
    /// A window of 60 seconds.
    Minute,
    /// A window of 3,600 seconds.
    Hour,
    /// A window of 86,400 seconds.
    Day,
    /// A window of 7 days. The window starts on Thursday, because the Unix epoch was a Thursday.
    Week,
    /// A window of 30 days.
    Month,
    /// A window of 365 days.
    Year,
}

impl Unit {
    /// Every unit with its upper-case name, as used in responses.
    pub const ALL: [(&'static str, Self); 8] = [
        ("UNKNOWN", Self::Unknown),
        ("SECOND", Self::Second),
        ("MINUTE", Self::Minute),
        ("HOUR", Self::Hour),
        ("DAY", Self::Day),
        ("WEEK", Self::Week),
        ("MONTH", Self::Month),
        ("YEAR", Self::Year),
    ];

    /// Parses the name of a unit, in upper or lower case.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        let named = Self::ALL
            .iter()
            .find(|(known, _)| known.eq_ignore_ascii_case(name));
        named.map(|(_, unit)| *unit)
    }

    /// Returns the upper-case name of the unit.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "UNKNOWN",
            Self::Second => "SECOND",
            Self::Minute => "MINUTE",
            Self::Hour => "HOUR",
            Self::Day => "DAY",
            Self::Week => "WEEK",
            Self::Month => "MONTH",
            Self::Year => "YEAR",
        }
    }

    /// Returns the duration of the unit; `None` for [`Self::Unknown`].
    #[must_use]
    pub const fn span(self) -> Option<Span> {
        let seconds = match self {
            Self::Unknown => return None,
            Self::Second => 1,
            Self::Minute => 60,
            Self::Hour => 3_600,
            Self::Day => 86_400,
            Self::Week => 7 * 86_400,
            Self::Month => 30 * 86_400,
            Self::Year => 365 * 86_400,
        };
        Some(Span::from_secs(seconds))
    }

    /// Returns the unit whose length equals the window of `limit`, or [`Self::Unknown`].
    pub(crate) fn of_limit(limit: &Limit) -> Self {
        match limit.algorithm() {
            Algorithm::FixedWindow {
                window: Window::Calendar(_),
                ..
            } => Self::Unknown,
            _ => Self::of_span(limit.window()).unwrap_or_default(),
        }
    }

    /// Returns the unit whose length equals `span`, if there is one.
    #[must_use]
    pub fn of_span(span: Span) -> Option<Self> {
        let long = Self::ALL.iter().find(|(_, unit)| unit.span() == Some(span));
        long.map(|(_, unit)| *unit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_has_a_name_and_a_length() {
        for (name, unit) in Unit::ALL {
            assert_eq!(Unit::parse(name), Some(unit));
            assert_eq!(Unit::parse(&name.to_lowercase()), Some(unit));
            assert_eq!(unit.as_str(), name);
            assert_eq!(
                unit.span().and_then(Unit::of_span),
                unit.span().map(|_| unit)
            );
        }
        assert_eq!(Unit::parse("fortnight"), None);
        assert_eq!(Unit::of_span(Span::from_secs(30)), None);
    }
}
