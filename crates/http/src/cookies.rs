//! The cookies of a request.

use std::borrow::Cow;

use http::{HeaderMap, header::COOKIE};

/// The values of all cookies called `name`, without the quotation marks that may stand around them.
pub(crate) fn cookies<'r>(
    headers: &'r HeaderMap,
    name: &str,
) -> impl Iterator<Item = Cow<'r, str>> {
    let lines = headers.get_all(COOKIE).iter();
    let pairs = lines
        .flat_map(|line| line.as_bytes().split(|octet| *octet == b';'))
        .filter_map(|pair| {
            let equals = pair.iter().position(|octet| *octet == b'=')?;
            Some((pair[..equals].trim_ascii(), pair[equals + 1..].trim_ascii()))
        });
    let named = pairs.filter(move |(known, _)| *known == name.as_bytes());
    named.map(|(_, value)| {
        let bare = value
            .strip_prefix(b"\"")
            .and_then(|rest| rest.strip_suffix(b"\""));
        String::from_utf8_lossy(bare.unwrap_or(value))
    })
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn all_cookies_of_a_name_are_found() {
        let mut headers = HeaderMap::new();
        for line in [
            "a=1; session=\"x=y\";empty=",
            "session=late; c = 3 ;=; ;flag",
        ] {
            headers.append(COOKIE, HeaderValue::from_static(line));
        }
        for (name, expected) in [
            ("a", &["1"][..]),
            ("session", &["x=y", "late"]),
            ("empty", &[""]),
            ("c", &["3"]),
            ("flag", &[]),
            ("A", &[]),
            ("d", &[]),
        ] {
            let found: Vec<_> = cookies(&headers, name).collect();
            assert_eq!(found, expected, "{name}");
        }
    }
}
