//! Requests that may be sent twice.

use http::Method;

/// Returns whether a request may be sent twice: the request must be idempotent and have no body. A
/// repeatable request is sent again if a reused connection closes before the first byte of the
/// response.
pub(super) fn is_repeatable(method: &Method, has_body: bool) -> bool {
    method.is_idempotent() && !has_body
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_idempotent_requests_without_a_body_are_repeatable() {
        for (method, has_body, expected) in [
            (Method::GET, false, true),
            (Method::DELETE, false, true),
            (Method::PUT, true, false),
            (Method::POST, false, false),
        ] {
            assert_eq!(is_repeatable(&method, has_body), expected, "{method}");
        }
    }
}
