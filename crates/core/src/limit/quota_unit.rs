//! The unit of a limit in the `RateLimit-Policy` header.

/// The unit in which a rule counts, as shown to clients in the header. The names are registered by
/// draft-ietf-httpapi-ratelimit-headers. A concurrency limit always counts concurrent requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum QuotaUnit {
    /// Requests. This unit is the default, so the header does not name it.
    #[default]
    Requests,
    /// The bytes of the content of requests or responses.
    ContentBytes,
}

impl QuotaUnit {
    /// All quota units.
    pub const ALL: [Self; 2] = [Self::Requests, Self::ContentBytes];

    /// Returns the registered name of the unit, which is also its name in the rules file.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::ContentBytes => "content-bytes",
        }
    }
}
