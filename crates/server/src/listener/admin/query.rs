//! Parses the query parameters of a request.

use percent_encoding::percent_decode_str;
use tidegate_core::{Span, notation};
use tidegate_net::{
    Problem,
    input::{advice, shown},
};

/// Reports that the parameter `after` is not a position in the requested list.
pub(super) fn invalid_position() -> Problem {
    Problem::bad(
        "after",
        "is not a `next` value of this list; omit `after` to start again",
    )
}

/// The percent-decoded parameters, in the order in which they occur in the query.
#[derive(Debug, Default)]
pub(super) struct Query(Vec<(String, String)>);

impl Query {
    /// Parses the query of a URL. Each parameter must be in `known`, and only `repeated` may be
    /// given more than once.
    pub(super) fn parse(
        query: Option<&str>,
        known: &[&str],
        repeated: Option<&str>,
    ) -> Result<Self, Problem> {
        let mut parsed = Self::default();
        let pairs = query.unwrap_or_default().split('&');
        for pair in pairs.filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            if !known.contains(&name) {
                let problem = format!("is not a parameter; {}", advice(name, known));
                return Err(Problem::bad(shown(name), problem));
            }
            if parsed.get(name).is_some() && repeated != Some(name) {
                return Err(Problem::bad(name, "is given twice; give it once"));
            }
            let value = percent_decode_str(value).decode_utf8();
            let value =
                value.map_err(|_| Problem::bad(name, "is not UTF-8 after percent-decoding"))?;
            parsed.0.push((name.to_owned(), value.into_owned()));
        }
        Ok(parsed)
    }

    /// Returns whether there are no parameters.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the first value of `name`.
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.all(name).next()
    }

    /// Returns every value of `name`.
    pub(super) fn all(&self, name: &str) -> impl Iterator<Item = &str> {
        let named = self.0.iter().filter(move |(known, _)| known == name);
        named.map(|(_, value)| value.as_str())
    }

    /// Returns the value of the parameter `n`, which must be from 1 to `most`.
    pub(super) fn count(&self, most: usize, default: usize) -> Result<usize, Problem> {
        let Some(text) = self.get("n") else {
            return Ok(default);
        };
        let count = text.parse().ok().filter(|count| (1..=most).contains(count));
        count.ok_or_else(|| {
            let range = 1..=u64::try_from(most).unwrap_or(u64::MAX);
            let (text, advice) = (shown(text), notation::integer_advice(text, &range));
            let problem = format!("must be a number from 1 to {most}, got `{text}`{advice}");
            Problem::bad("n", problem)
        })
    }

    /// Returns the value of the parameter `name`, which must be a duration.
    pub(super) fn span(&self, name: &str) -> Result<Option<Span>, Problem> {
        let span = self.get(name).map(notation::span).transpose();
        span.map_err(|error| Problem::bad(name, error.to_string()))
    }
}
