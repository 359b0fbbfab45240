//! Entry values: headers, cookies, query parameters, and values derived from them.

use std::borrow::Cow;

use http::HeaderMap;

use crate::{
    AmbiguousRequest, DerivedEntry,
    ambiguous::single_value,
    cookies::cookie_entry,
    header::{header_text, joined_header},
    target::RequestTarget,
};

/// The value of an entry: `None` if the entry is absent, and an error if the value is ambiguous.
pub type EntryValue<'r> = Result<Option<Cow<'r, str>>, AmbiguousRequest>;

/// Returns the value of the entry `name`. If there is a derived entry of this name, returns the
/// value of the derived entry. Without a derived entry, returns the value from `given`. An empty
/// value counts as absent.
pub(crate) fn derived_or_given<'r>(
    derived: &[(Box<str>, DerivedEntry)],
    name: &str,
    given: impl Fn(&str) -> EntryValue<'r>,
) -> EntryValue<'r> {
    let derived = derived.iter().find(|(known, _)| **known == *name);
    let value = match derived {
        None => given(name)?,
        Some((_, derived)) => given(derived.source())?.and_then(|whole| match whole {
            Cow::Borrowed(whole) => derived.extract(whole).map(Cow::Borrowed),
            Cow::Owned(whole) => derived
                .extract(&whole)
                .map(|part| Cow::Owned(part.to_owned())),
        }),
    };
    Ok(value.filter(|value| !value.is_empty()))
}

/// Returns an entry that the client controls: a header, cookie or query parameter. The prefix of
/// `name` selects the kind. Returns `None` if `name` has none of these prefixes.
pub(crate) fn prefixed_entry<'r>(
    name: &str,
    headers: &'r HeaderMap,
    target: Option<&RequestTarget<'_>>,
) -> Option<EntryValue<'r>> {
    Some(if let Some(known) = name.strip_prefix("header.") {
        header_entry(name, headers, known)
    } else if let Some(known) = name.strip_prefix("cookie.") {
        cookie_entry(name, headers, known)
    } else {
        let known = name.strip_prefix("query.")?;
        target.map_or(Ok(None), |target| {
            single_value(name, target.parameters(known))
        })
    })
}

/// Returns the value of the header `known`, which is the source of the entry `name`. Joins several
/// `Cookie` lines, because HTTP/2 may send each cookie in its own line.
pub(crate) fn header_entry<'r>(name: &str, headers: &'r HeaderMap, known: &str) -> EntryValue<'r> {
    if known.eq_ignore_ascii_case("cookie") {
        return Ok(joined_header(headers, known, "; "));
    }
    single_value(name, headers.get_all(known).iter().map(header_text))
}
