//! Fast header lookup: a linear scan in small header maps, a hash lookup in large ones.

use http::{HeaderMap, HeaderName, HeaderValue};

/// The maximum number of header names for which a scan is cheaper than a hash lookup.
const SCAN_LIMIT: usize = 4;

/// Returns whether any of these headers is present. A single scan is cheaper than several lookups.
pub(crate) fn has_any(headers: &HeaderMap, names: &[HeaderName]) -> bool {
    headers.keys().any(|name| names.contains(name))
}

/// Returns whether this header is present.
pub(crate) fn has(headers: &HeaderMap, name: &HeaderName) -> bool {
    if headers.keys_len() > SCAN_LIMIT {
        return headers.contains_key(name);
    }
    headers.keys().any(|other| other == name)
}

/// Returns the first value of this header.
pub(crate) fn first<'h>(headers: &'h HeaderMap, name: &HeaderName) -> Option<&'h HeaderValue> {
    if headers.keys_len() > SCAN_LIMIT {
        return headers.get(name);
    }
    let line = headers.iter().find(|(other, _)| *other == name);
    line.map(|(_, value)| value)
}

/// Returns whether this header occurs more than once.
pub(crate) fn is_repeated(headers: &HeaderMap, name: &HeaderName) -> bool {
    headers.len() > headers.keys_len() && headers.get_all(name).iter().nth(1).is_some()
}

/// Removes this header. Optimised for rarely present headers.
pub(crate) fn remove(headers: &mut HeaderMap, name: &HeaderName) {
    if has(headers, name) {
        headers.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use http::header::{ACCEPT, COOKIE, HOST};

    use super::*;

    #[test]
    fn lookups_agree_for_few_and_many_lines() {
        for others in 0..2 * SCAN_LIMIT {
            let mut headers = HeaderMap::new();
            for other in 0..others {
                let name = HeaderName::try_from(format!("x-{other}")).unwrap();
                headers.insert(name, HeaderValue::from_static("x"));
            }
            headers.append(HOST, HeaderValue::from_static("h"));
            headers.append(COOKIE, HeaderValue::from_static("a"));
            headers.append(COOKIE, HeaderValue::from_static("b"));
            assert_eq!(first(&headers, &COOKIE).unwrap(), "a");
            assert_eq!(first(&headers, &ACCEPT), None);
            assert!(has(&headers, &COOKIE) && !has(&headers, &ACCEPT));
            assert!(has_any(&headers, &[ACCEPT, HOST]) && !has_any(&headers, &[ACCEPT]));
            assert!(is_repeated(&headers, &COOKIE) && !is_repeated(&headers, &HOST));
            remove(&mut headers, &ACCEPT);
            remove(&mut headers, &COOKIE);
            assert_eq!(headers.len(), others + 1);
        }
    }
}
