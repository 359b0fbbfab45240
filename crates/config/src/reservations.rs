//! `reservations`: the settings for reservations, which are charges that are settled later.

use tidegate_core::{Span, notation};

use super::{
    AdminToken, Password,
    report::Report,
    secrets::{self, SecretKeys},
    value::{Fields, Shape},
};

/// The maximum of `max`, the number of outstanding reservations.
const MAX_OUTSTANDING: u64 = 10_000_000;

/// The minimum of `max_ttl`.
const MIN_TTL: Span = Span::from_secs(1);
/// The maximum of `max_ttl`.
const MAX_TTL: Span = Span::from_secs(24 * 3_600);

/// The minimum length of a secret in bytes.
const MIN_SECRET_BYTES: usize = 16;

/// What happens to a reservation's charges when it expires.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReservationExpiry {
    /// `refund`: the charges are refunded, so an expired reservation costs nothing.
    #[default]
    Refund,
    /// `charge`: the charges are kept.
    Charge,
}

/// The settings for reservations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReservationsConfig {
    /// `max`: the maximum number of outstanding reservations on this server, up to 10,000,000;
    /// default 100,000. With 0 (`reservations: off`), the server rejects all reservations.
    pub max: usize,
    /// `max_ttl`: the longest time until a reservation expires, 1 s to 24 h; default 10 min.
    pub max_ttl: Span,
    /// `on_expiry`: whether the charges of an expired reservation are refunded or kept; default
    /// `refund`.
    pub on_expiry: ReservationExpiry,
    /// `secret` or `secret_env`: the secrets for sealing tokens, separated by spaces. New tokens
    /// are sealed with the first secret, and tokens sealed with any of the secrets are accepted. If
    /// neither field is set, the server generates a random secret at each start, and accepts only
    /// its own tokens.
    pub credential: Password,
}

impl Default for ReservationsConfig {
    fn default() -> Self {
        Self {
            max: 100_000,
            max_ttl: Span::from_secs(600),
            on_expiry: ReservationExpiry::default(),
            credential: Password::None,
        }
    }
}

pub(super) fn reservations(
    file: &Fields<'_>,
    has_redis: bool,
    report: &mut Report,
) -> ReservationsConfig {
    let mut settings = ReservationsConfig::default();
    let Some(value) = file.get("reservations") else {
        return settings;
    };
    let what = "off, or a map such as {max_ttl: 5min, secret_env: RESERVATION_SECRET}";
    if let Shape::Scalar = value.shape() {
        match value.scalar() {
            Some("off") => settings.max = 0,
            _ => value.expected(report, what),
        }
        return settings;
    }
    let known = &["max", "max_ttl", "on_expiry", "secret", "secret_env"];
    let Some(fields) = value.fields(report, what, known) else {
        return settings;
    };
    if let Some(value) = fields.get("max")
        && let Some(max) = value.number(report)
    {
        if !(1..=MAX_OUTSTANDING).contains(&max) {
            value.wrong(
                report,
                "must be 1 to 10000000; to reject reservations, write `reservations: off`",
            );
        }
        settings.max = usize::try_from(max).unwrap_or(settings.max);
    }
    if let Some(value) = fields.get("max_ttl")
        && let Some(ttl) = value.parsed(report, "a duration such as 10min", notation::span)
    {
        if !(MIN_TTL..=MAX_TTL).contains(&ttl) {
            value.wrong(report, "must be 1s to 24h");
        }
        settings.max_ttl = ttl;
    }
    if let Some(value) = fields.get("on_expiry") {
        let choices = [
            ("refund", ReservationExpiry::Refund),
            ("charge", ReservationExpiry::Charge),
        ];
        settings.on_expiry = value.choice(report, &choices).unwrap_or_default();
    }
    settings.credential = match secrets::secret(&fields, SecretKeys::SECRET, report) {
        AdminToken::None => Password::None,
        AdminToken::Literal(secret) => Password::Literal(secret),
        AdminToken::Env(name) => Password::Env(name),
    };
    if let Password::Literal(secret) = &settings.credential
        && let Err(problem) = check_secrets(secret)
    {
        fields.wrong(report, "secret", problem);
    }
    if has_redis && settings.credential == Password::None && !fields.tries("secret_env") {
        fields.wrong(
            report,
            "secret_env",
            "is missing; servers that share a Redis settle each other's reservations, so name the \
             environment variable with their common secret",
        );
    }
    settings
}

/// Checks one or more secrets, separated by spaces.
///
/// # Errors
///
/// Returns an error message if there is no secret, or if any secret is too short.
pub fn check_secrets(secrets: &str) -> Result<(), &'static str> {
    let mut secrets = secrets.split_whitespace().peekable();
    if secrets.peek().is_none() {
        return Err("must not be empty");
    }
    if secrets.any(|secret| secret.len() < MIN_SECRET_BYTES) {
        return Err(
            "must have at least 16 bytes for each secret; for example, use the output of `openssl rand -hex 32`",
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;

    #[test]
    fn settings_have_defaults() {
        let settings = |text: &str| Config::parse(text).unwrap().reservations;
        assert_eq!(settings("rules: []"), ReservationsConfig::default());
        assert_eq!(settings("reservations: off").max, 0);
        let written = "reservations: {max: 5, max_ttl: 1h, on_expiry: charge, secret_env: S}";
        let expected = ReservationsConfig {
            max: 5,
            max_ttl: Span::from_secs(3_600),
            on_expiry: ReservationExpiry::Charge,
            credential: Password::Env("S".to_owned()),
        };
        assert_eq!(settings(written), expected);
    }

    #[test]
    fn every_mistake_is_reported_with_its_line() {
        let errors = |text: &str| {
            let mistakes = Config::parse(text).unwrap_err();
            mistakes.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(
            errors("reservations: {max: 0, max_ttl: 25h, secret: short}"),
            [
                "reservations.max (line 1): must be 1 to 10000000; to reject reservations, write `reservations: off`",
                "reservations.max_ttl (line 1): must be 1s to 24h",
                "reservations.secret (line 1): must have at least 16 bytes for each secret; for example, use the output of `openssl rand -hex 32`",
            ]
        );
        let redis = "store: {redis: 'redis://127.0.0.1'}\nreservations: {max: 5}";
        assert_eq!(
            errors(redis),
            [
                "reservations.secret_env (line 2): is missing; servers that share a Redis settle each other's reservations, so name the environment variable with their common secret",
            ]
        );
    }
}
