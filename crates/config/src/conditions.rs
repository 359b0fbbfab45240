//! Conditions in `when` and `allow`, in two forms. The raw form keeps the conditions as written in
//! the rules file, with the line of every part. The converted form is used to evaluate rules.
//!
//! For example, reading a value creates a [`RawPattern`]. The lints check the [`RawPattern`], and
//! the code that reads rules converts it to a [`Pattern`].

use std::borrow::Cow;

use tidegate_core::{ActiveHours, Condition, Days, Hours, Pattern, RuleError, When};

use super::{
    report::{Report, renamed_entry},
    source_span::{Scalar, SourceSpan},
    value::{Shape, Value},
};

const OPERATORS: &[&str] = &["is", "not", "route", "cidr", "regex", "present"];

/// The keys of a schedule. However, if the value of a schedule key is a map of operators, the key
/// is an ordinary entry.
const SCHEDULE: [&str; 3] = ["time", "days", "zone"];

/// The conditions on entries in a `when` or in an item of `allow`, as written in the rules file.
#[derive(Debug, Default)]
pub(crate) struct RawWhen<'n> {
    pub(crate) conditions: Vec<RawCondition<'n>>,
}

/// A condition on an entry, as written in the rules file.
#[derive(Debug)]
pub(crate) struct RawCondition<'n> {
    pub(crate) entry: &'n str,
    /// The position of the pattern in the file. The pattern is the value of the key with the
    /// entry's name.
    pub(crate) span: SourceSpan,
    pub(crate) pattern: RawPattern<'n>,
}

/// The pattern of an entry, as written in the rules file.
#[derive(Debug)]
pub(crate) enum RawPattern<'n> {
    /// A string without an operator: an exact value or a glob.
    Text(Scalar<'n>),
    /// A list of patterns, at least one of which must match.
    AnyOf(SourceSpan, Vec<Self>),
    /// A map of operators, all of which must hold.
    AllOf(RawOperators<'n>),
    /// A value that is not a pattern. The error has already been reported.
    Unreadable,
}

/// The operators of a pattern, as written in the rules file.
#[derive(Debug)]
pub(crate) struct RawOperators<'n> {
    span: SourceSpan,
    operators: Vec<RawOperator<'n>>,
    /// Whether every key of the map is an operator. Keys that are not operators have already been
    /// reported.
    are_known: bool,
}

/// An operator of a pattern, as written in the rules file.
#[derive(Debug)]
enum RawOperator<'n> {
    /// An operator whose operand is a string or a list of strings.
    OfTexts {
        operator: TextOperator,
        span: SourceSpan,
        /// The operands. `None` stands for a value that is not a string and has already been
        /// reported.
        texts: Vec<Option<Scalar<'n>>>,
    },
    Not(RawPattern<'n>),
    /// The operator `present`. `None` stands for a value that is not a boolean and has already been
    /// reported.
    Present(Option<bool>),
}

/// An operator whose operands are strings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TextOperator {
    Is,
    Route,
    Cidr,
    Regex,
}

/// How a string in a pattern is compared with an entry's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TextComparison {
    /// No operator: the string is compared literally, or as a glob if it contains a `*`.
    Plain,
    /// The operator `is`: the string is compared literally.
    Is,
    /// The operator `route`: the string is compared with a path as many web frameworks compare
    /// routes with paths.
    Route,
    /// The operator `regex`: the string is a regular expression.
    Regex,
}

/// A string in a pattern, and how the string is compared.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PatternText<'r, 'n> {
    pub(crate) scalar: &'r Scalar<'n>,
    pub(crate) comparison: TextComparison,
    /// Whether the string is inside the operand of a `not`.
    pub(crate) is_negated: bool,
}

/// The reason why a pattern that is valid YAML cannot be converted to a [`Pattern`].
#[derive(Debug)]
pub(crate) struct PatternProblem<'r> {
    span: &'r SourceSpan,
    problem: String,
}

/// Reads a map of conditions, all of which must hold. The map contains conditions on entries, and
/// an optional schedule. Returns the conditions as written, and the parsed conditions, which are
/// `None` if the map is invalid.
pub(super) fn when<'n>(value: &Value<'n>, report: &mut Report) -> (RawWhen<'n>, Option<When>) {
    let what = "a map of conditions such as {path: /api/**}";
    match value.pairs(report, what) {
        Some(pairs) => when_of(pairs, report),
        None => (RawWhen::default(), None),
    }
}

/// Reads the conditions of `when` from the keys and values of its map.
pub(super) fn when_of<'n>(
    pairs: Vec<(&'n str, Value<'n>)>,
    report: &mut Report,
) -> (RawWhen<'n>, Option<When>) {
    let (mut conditions, before) = (Vec::new(), report.count());
    let (mut scheduled, mut raw) = (Vec::new(), RawWhen::default());
    for (entry, value) in pairs {
        if is_misplaced(entry, &value) {
            let message = "is not part of a schedule, which has only `time`, `days` and `zone`; to match an \
                entry of this name, write {is: …}";
            value.wrong_key(report, message);
        } else if let Some(new) = renamed_entry(entry) {
            value.wrong_key(report, format!("was renamed to `{new}`"));
        } else if is_schedule(entry, &value) {
            scheduled.push((entry, value));
        } else {
            let condition = RawCondition::read(entry, &value, report);
            conditions.extend(condition.build(report));
            raw.conditions.push(condition);
        }
    }
    let schedule = schedule(&scheduled, report);
    if report.count() > before {
        return (raw, None);
    }
    let when = When::all(conditions);
    let when = match schedule {
        Some(schedule) => when.during(schedule),
        None => when,
    };
    (raw, Some(when))
}

impl<'n> RawCondition<'n> {
    /// Reads the condition that `entry` matches the pattern `value`.
    pub(super) fn read(entry: &'n str, value: &Value<'n>, report: &mut Report) -> Self {
        Self {
            entry,
            span: value.span().clone(),
            pattern: RawPattern::read(value, report),
        }
    }

    /// Converts the condition to a [`Condition`]. Reports all problems; if there are any, returns
    /// `None`.
    pub(super) fn build(&self, report: &mut Report) -> Option<Condition> {
        let pattern = self.pattern.build(report)?;
        let condition = Condition::new(&entry_name(self.entry), pattern);
        condition
            .map_err(|error| self.span.wrong(report, error.problem))
            .ok()
    }
}

impl<'n> RawPattern<'n> {
    /// Reads the pattern that one entry must match.
    pub(super) fn read(value: &Value<'n>, report: &mut Report) -> Self {
        match value.shape() {
            Shape::Scalar => {
                let what = "a value, a list of values, or a map such as {not: …}";
                let text = value.text_with_span(report, what);
                text.map_or(Self::Unreadable, Self::Text)
            }
            Shape::List => {
                let items = value.items(report, "a list").unwrap_or_default();
                let patterns = items.iter().map(|item| Self::read(item, report));
                Self::AnyOf(value.span().clone(), patterns.collect())
            }
            Shape::Map => {
                let operators = RawOperators::read(value, report);
                operators.map_or(Self::Unreadable, Self::AllOf)
            }
        }
    }

    /// Converts the pattern to a [`Pattern`]. Reports all problems; if there are any, returns
    /// `None`. Also returns `None` if a part of the pattern could not be read.
    pub(super) fn build(&self, report: &mut Report) -> Option<Pattern> {
        let built = self.convert();
        if let Err(problems) = &built {
            for PatternProblem { span, problem } in problems {
                span.wrong(report, problem);
            }
        }
        built.ok()
    }

    /// Converts the pattern to a [`Pattern`]. If the pattern is invalid, returns the problems that
    /// have not been reported yet. The returned list is empty if all problems have been reported.
    pub(super) fn convert(&self) -> Result<Pattern, Vec<PatternProblem<'_>>> {
        match self {
            Self::Unreadable => Err(Vec::new()),
            Self::Text(scalar) => accept(Pattern::text(scalar.text), &scalar.span),
            Self::AnyOf(span, patterns) => {
                let patterns = all(patterns.iter().map(Self::convert))?;
                accept(Pattern::any_of(patterns), span)
            }
            Self::AllOf(operators) => operators.convert(),
        }
    }

    /// Returns the strings in the pattern that are compared with an entry's value, in file order.
    pub(crate) fn texts(&self) -> Vec<PatternText<'_, 'n>> {
        match self {
            Self::Unreadable => Vec::new(),
            Self::Text(scalar) => vec![PatternText {
                scalar,
                comparison: TextComparison::Plain,
                is_negated: false,
            }],
            Self::AnyOf(_, patterns) => patterns.iter().flat_map(Self::texts).collect(),
            Self::AllOf(RawOperators { operators, .. }) => {
                operators.iter().flat_map(RawOperator::texts).collect()
            }
        }
    }
}

impl<'n> RawOperators<'n> {
    /// Reads a map of operators.
    fn read(value: &Value<'n>, report: &mut Report) -> Option<Self> {
        let before = report.count();
        let fields = value.fields(report, "a map", OPERATORS)?;
        let are_known = report.count() == before;
        let operators = fields.iter().filter_map(|(name, value)| {
            let operator = TextOperator::named(name);
            match (operator, *name) {
                (Some(operator), _) => Some(RawOperator::of_texts(operator, value, report)),
                (None, "not") => Some(RawOperator::Not(RawPattern::read(value, report))),
                (None, "present") => Some(RawOperator::Present(value.flag(report))),
                // This case cannot occur, because `fields` contains only the names in `OPERATORS`.
                (None, _) => None,
            }
        });
        Some(Self {
            span: value.span().clone(),
            operators: operators.collect(),
            are_known,
        })
    }

    fn convert(&self) -> Result<Pattern, Vec<PatternProblem<'_>>> {
        let mut operators: Vec<&RawOperator<'n>> = self.operators.iter().collect();
        operators.sort_by_key(|operator| operator.rank());
        let patterns = all(operators.into_iter().map(RawOperator::convert))?;
        if !self.are_known {
            return Err(Vec::new());
        }
        accept(Pattern::all_of(patterns), &self.span)
    }
}

impl<'n> RawOperator<'n> {
    fn of_texts(operator: TextOperator, value: &Value<'n>, report: &mut Report) -> Self {
        let items = value.one_or_more(report);
        let texts = items
            .iter()
            .map(|item| item.text_with_span(report, operator.operand()));
        Self::OfTexts {
            operator,
            span: value.span().clone(),
            texts: texts.collect(),
        }
    }

    /// Returns the operator's position in [`OPERATORS`]. In a converted pattern, the operators are
    /// sorted by their position in [`OPERATORS`].
    fn rank(&self) -> Option<usize> {
        let name = match self {
            Self::OfTexts { operator, .. } => operator.name(),
            Self::Not(_) => "not",
            Self::Present(_) => "present",
        };
        OPERATORS.iter().position(|known| *known == name)
    }

    fn convert(&self) -> Result<Pattern, Vec<PatternProblem<'_>>> {
        match self {
            Self::OfTexts {
                operator,
                span,
                texts,
            } => operator.convert(span, texts),
            Self::Not(pattern) => pattern.convert().map(Pattern::negated),
            Self::Present(Some(true)) => Ok(Pattern::present()),
            Self::Present(Some(false)) => Ok(Pattern::absent()),
            Self::Present(None) => Err(Vec::new()),
        }
    }

    fn texts(&self) -> Vec<PatternText<'_, 'n>> {
        match self {
            Self::Present(_) => Vec::new(),
            Self::Not(pattern) => {
                let mut texts = pattern.texts();
                for text in &mut texts {
                    text.is_negated = !text.is_negated;
                }
                texts
            }
            Self::OfTexts {
                operator, texts, ..
            } => {
                let Some(comparison) = operator.comparison() else {
                    return Vec::new();
                };
                let text = |scalar| PatternText {
                    scalar,
                    comparison,
                    is_negated: false,
                };
                texts.iter().flatten().map(text).collect()
            }
        }
    }
}

impl TextOperator {
    const ALL: [Self; 4] = [Self::Is, Self::Route, Self::Cidr, Self::Regex];

    fn named(name: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|operator| operator.name() == name)
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Is => "is",
            Self::Route => "route",
            Self::Cidr => "cidr",
            Self::Regex => "regex",
        }
    }

    /// Returns a description of the operand for messages.
    const fn operand(self) -> &'static str {
        match self {
            Self::Is => "a value",
            Self::Route => "a path",
            Self::Cidr => "a network such as 10.0.0.0/8",
            Self::Regex => "a regular expression",
        }
    }

    /// Returns how the operator compares strings; `None` if it compares addresses.
    const fn comparison(self) -> Option<TextComparison> {
        match self {
            Self::Is => Some(TextComparison::Is),
            Self::Route => Some(TextComparison::Route),
            Self::Regex => Some(TextComparison::Regex),
            Self::Cidr => None,
        }
    }

    fn convert<'r>(
        self,
        span: &'r SourceSpan,
        texts: &'r [Option<Scalar<'_>>],
    ) -> Result<Pattern, Vec<PatternProblem<'r>>> {
        let build = |text: &str| match self {
            Self::Is => Pattern::exact(text),
            Self::Route => Pattern::route(text),
            // Check each network separately, so that an error is reported on the network's own
            // line.
            Self::Cidr => Pattern::networks(&[text]),
            Self::Regex => Pattern::regex(text),
        };
        let patterns = all(texts.iter().map(|scalar| match scalar {
            Some(scalar) => accept(build(scalar.text), &scalar.span),
            None => Err(Vec::new()),
        }))?;
        if self == Self::Cidr {
            let networks: Vec<&str> = texts.iter().flatten().map(|scalar| scalar.text).collect();
            return accept(Pattern::networks(&networks), span);
        }
        accept(Pattern::any_of(patterns), span)
    }
}

/// Returns all converted patterns. If at least one pattern has a problem, returns all problems
/// instead.
fn all<'r>(
    converted: impl Iterator<Item = Result<Pattern, Vec<PatternProblem<'r>>>>,
) -> Result<Vec<Pattern>, Vec<PatternProblem<'r>>> {
    let (mut patterns, mut problems, mut is_whole) = (Vec::new(), Vec::new(), true);
    for pattern in converted {
        match pattern {
            Ok(pattern) => patterns.push(pattern),
            Err(more) => {
                is_whole = false;
                problems.extend(more);
            }
        }
    }
    if is_whole {
        Ok(patterns)
    } else {
        Err(problems)
    }
}

/// Converts an error about a pattern to a problem at `span`. Returns a valid pattern unchanged.
fn accept(
    converted: Result<Pattern, RuleError>,
    span: &SourceSpan,
) -> Result<Pattern, Vec<PatternProblem<'_>>> {
    converted.map_err(|error| {
        vec![PatternProblem {
            span,
            problem: error.problem,
        }]
    })
}

/// Returns the name that rules use for `entry`. Header names are case-insensitive, so the name in
/// `header.NAME` is converted to lower case.
#[must_use]
pub fn entry_name(entry: &str) -> Cow<'_, str> {
    let is_header = entry.starts_with("header.");
    if is_header && entry.bytes().any(|byte| byte.is_ascii_uppercase()) {
        return Cow::Owned(entry.to_ascii_lowercase());
    }
    Cow::Borrowed(entry)
}

/// Keys that look like parts of a schedule, but that schedules do not support.
const NOT_IN_SCHEDULE: [&str; 11] = [
    "until", "since", "before", "after", "hours", "times", "day", "weekday", "weekdays",
    "timezone", "tz",
];

/// Returns whether the author probably meant the key `entry` as part of a schedule, although
/// schedules do not support it. If the key were treated as an entry, the rule would never apply,
/// because no request has an entry with this name.
fn is_misplaced(entry: &str, value: &Value<'_>) -> bool {
    NOT_IN_SCHEDULE.contains(&entry) && !matches!(value.shape(), Shape::Map)
}

/// Returns whether the key `entry` is part of a schedule instead of a request entry.
fn is_schedule(entry: &str, value: &Value<'_>) -> bool {
    SCHEDULE.contains(&entry) && !matches!(value.shape(), Shape::Map)
}

/// Creates the schedule from the fields `time`, `days` and `zone`. Returns `None` if both `time`
/// and `days` are missing.
fn schedule(fields: &[(&str, Value<'_>)], report: &mut Report) -> Option<ActiveHours> {
    let field = |name| fields.iter().find(|(known, _)| *known == name);
    let [time, days, zone] = SCHEDULE.map(|name| field(name).map(|(_, value)| value));
    let hours = time.map(|value| listed(value, report, "22:00-06:00", Hours::parse));
    let of_week = days.map(|value| listed(value, report, "mon", Days::parse));
    let name = zone.map_or(Some("UTC"), |zone| {
        zone.text(report, "a time zone such as Europe/Berlin")
    });
    if time.is_none() && days.is_none() {
        zone?.wrong(
            report,
            "requires `time` or `days`; to match an entry of this name, write {is: …}",
        );
        return None;
    }
    let of_week = of_week.and_then(|days| days.into_iter().reduce(Days::and));
    let built = ActiveHours::new(
        hours.unwrap_or_default(),
        of_week.unwrap_or(Days::ALL),
        name?,
    );
    let at = |error: &RuleError| if error.field == "zone" { zone } else { time };
    built
        .map_err(|error| at(&error).map(|value| value.wrong(report, error.problem)))
        .ok()
}

/// Reads one value or a list of values with `read`. Error messages contain `example`.
fn listed<T>(
    value: &Value<'_>,
    report: &mut Report,
    example: &str,
    read: impl Fn(&str) -> Result<T, RuleError>,
) -> Vec<T> {
    let items = value.one_or_more(report);
    if items.is_empty() {
        let problem = format!("is empty; write a value such as {example}, or remove it");
        value.wrong(report, problem);
    }
    let what = format!("a string such as {example}");
    let items = items.iter();
    items
        .filter_map(|item| item.parsed(report, &what, &read))
        .collect()
}

/// Reads the allow list: a map of conditions, or a list of such maps. A request that meets all
/// conditions in at least one map is admitted without being charged.
pub(super) fn allow<'n>(value: &Value<'n>, report: &mut Report) -> (Vec<RawWhen<'n>>, Vec<When>) {
    let (mut raw, mut items) = (Vec::new(), Vec::new());
    for item in value.one_or_more(report) {
        if item.is_empty_map() {
            item.wrong(
                report,
                "has no conditions, so it would match every request; add at least one condition",
            );
            continue;
        }
        let (conditions, item) = when(&item, report);
        raw.push(conditions);
        items.extend(item);
    }
    (raw, items)
}
