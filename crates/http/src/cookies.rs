//! The cookies of a request.

use http::{HeaderMap, header::COOKIE};

/// The first cookie called `name`, without the quotation marks that may stand around it.
pub(crate) fn cookie(headers: &HeaderMap, name: &str) -> Option<String> {
    let lines = headers.get_all(COOKIE).iter();
    let mut pairs = lines
        .flat_map(|line| line.as_bytes().split(|octet| *octet == b';'))
        .filter_map(|pair| {
            let equals = pair.iter().position(|octet| *octet == b'=')?;
            Some((pair[..equals].trim_ascii(), pair[equals + 1..].trim_ascii()))
        });
    let (_, value) = pairs.find(|(known, _)| *known == name.as_bytes())?;
    let bare = value
        .strip_prefix(b"\"")
        .and_then(|rest| rest.strip_suffix(b"\""));
    Some(String::from_utf8_lossy(bare.unwrap_or(value)).into_owned())
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn the_first_cookie_of_a_name_is_found() {
        let mut headers = HeaderMap::new();
        for line in [
            "a=1; session=\"x=y\";empty=",
            "session=late; c = 3 ;=; ;flag",
        ] {
            headers.append(COOKIE, HeaderValue::from_static(line));
        }
        for (name, expected) in [
            ("a", Some("1")),
            ("session", Some("x=y")),
            ("empty", Some("")),
            ("c", Some("3")),
            ("flag", None),
            ("A", None),
            ("d", None),
        ] {
            assert_eq!(cookie(&headers, name).as_deref(), expected, "{name}");
        }
    }
}
