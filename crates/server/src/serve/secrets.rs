//! Secrets from the environment, and the tokens of the admin listener.

use std::{fmt, net::SocketAddr};

use tidegate_config::{Config, TokenScope};
use tidegate_limiter::events::WebhookSecret;

use super::error::ServeError;
use crate::listener::admin::AdminCredential;

/// Secrets from the environment variables that the rules file names. The caller of
/// [`start`](super::start) reads the variables.
#[derive(Clone, Default)]
pub struct Secrets {
    /// The admin token, if one is configured.
    pub token: Option<String>,
    /// The tokens of [`Config::operator_tokens`], in the same order.
    pub operator_tokens: Vec<String>,
    /// The webhook secrets, in the order of the webhooks in [`Config::events`].
    pub webhook_secrets: Vec<String>,
    /// The password for Redis, if there is one.
    pub password: Option<String>,
    /// The token of the HTTP listener, if there is one.
    pub http_token: Option<String>,
    /// The password of the Redis protocol listener, if there is one.
    pub resp_password: Option<String>,
    /// The secret for hashing keys, if there is one.
    pub key_secret: Option<String>,
    /// The secrets for sealing reservation tokens, if there are any.
    pub reservation_secrets: Option<String>,
}

/// Omits the values, so that secrets never reach a log.
impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secrets(…)")
    }
}

/// Returns the errors in `secrets` that would prevent a server with `config` from starting.
#[must_use]
pub fn secret_errors(config: &Config, secrets: &Secrets) -> Vec<ServeError> {
    let credentials = admin_credentials(config, secrets);
    let twins = credentials.iter().enumerate().filter_map(|(at, one)| {
        let earlier = credentials[..at].iter();
        let twin = earlier.rev().find(|other| other.token == one.token)?;
        Some(ServeError::EqualTokens(twin.name.clone(), one.name.clone()))
    });
    let webhooks = secrets.webhook_secrets.iter().enumerate();
    let webhooks = webhooks.filter_map(|(index, secret)| {
        let problem = WebhookSecret::parse(secret).err()?;
        Some(ServeError::WebhookSecret { index, problem })
    });
    twins.chain(webhooks).collect()
}

/// Returns the tokens of the admin listener. The unnamed token comes first.
pub(super) fn admin_credentials(config: &Config, secrets: &Secrets) -> Vec<AdminCredential> {
    let unnamed = secrets.token.clone().map(|token| AdminCredential {
        name: "admin".to_owned(),
        scope: TokenScope::Operate,
        token,
    });
    let named = config.operator_tokens.iter().zip(&secrets.operator_tokens);
    let named = named.map(|(operator, token)| AdminCredential {
        name: operator.name.clone(),
        scope: operator.scope,
        token: token.clone(),
    });
    unnamed.into_iter().chain(named).collect()
}

/// Requires a token for an admin listener that is not on a loopback address.
pub(super) fn check_admin(
    address: Option<SocketAddr>,
    credentials: &[AdminCredential],
) -> Result<(), ServeError> {
    match address {
        Some(address) if credentials.is_empty() && !address.ip().is_loopback() => {
            Err(ServeError::OpenAdmin(address))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unusable_secrets_are_named() {
        let text = "
admin:
  token_env: A
  tokens: [{name: alice, token_env: B}, {name: bob, token_env: C}]
events: {webhooks: [{url: 'http://h', secret_env: D}, {url: 'http://h', secret_env: E}]}
";
        let config = Config::parse(text).unwrap();
        let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        let secrets = Secrets {
            token: Some("one".to_owned()),
            operator_tokens: texts(&["two", "one"]),
            webhook_secrets: texts(&["any text", "whsec_c2hvcnQ="]),
            ..Secrets::default()
        };
        let errors = secret_errors(&config, &secrets);
        let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
        assert_eq!(errors.len(), 2, "{errors:?}");
        assert_eq!(
            errors[0],
            "admin.tokens: the tokens \"admin\" and \"bob\" have the same secret; give each token \
             its own secret"
        );
        assert!(
            errors[1].starts_with("events.webhooks[1]: the secret has `whsec_` followed by a key"),
            "{errors:?}"
        );
        assert!(secret_errors(&config, &Secrets::default()).is_empty());
    }
}
