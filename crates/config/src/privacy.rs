//! `privacy`: whether the server shows keys unchanged or hashed.

use super::{
    AdminToken, KeyMask, NoRandomBytes, Password,
    report::Report,
    secrets::{self, SecretKeys},
    value::{Fields, Value},
};

/// How keys appear in lists of keys: top talkers, denials and explanations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum KeyPrivacy {
    /// `keys: plain`: keys are shown unchanged.
    #[default]
    Plain,
    /// `keys: hashed`: each key value is shown as a keyed hash.
    Hashed {
        /// `secret` or `secret_env`: the hash secret. If neither is set, the server generates a
        /// random secret at each start.
        secret: Password,
    },
}

impl KeyPrivacy {
    /// Returns the mask that determines how keys are shown. `secret` is the secret that
    /// [`Self::Hashed`] configures, if any.
    ///
    /// # Errors
    ///
    /// Fails if keys are hashed without a secret, and the operating system provides no random
    /// bytes.
    pub fn mask(&self, secret: Option<&str>) -> Result<KeyMask, NoRandomBytes> {
        match (self, secret) {
            (Self::Plain, _) => Ok(KeyMask::plain()),
            (Self::Hashed { .. }, Some(secret)) => Ok(KeyMask::hashed(secret.as_bytes())),
            (Self::Hashed { .. }, None) => KeyMask::random(),
        }
    }
}

pub(super) fn privacy(file: &Fields<'_>, has_redis: bool, report: &mut Report) -> KeyPrivacy {
    let known = &["keys", "secret", "secret_env"];
    let what = "a map such as {keys: hashed}";
    let value = file.get("privacy");
    let Some(fields) = value.and_then(|value| value.fields(report, what, known)) else {
        return KeyPrivacy::Plain;
    };
    let is_hashed = fields
        .get("keys")
        .and_then(|keys| read_hashed(keys, report));
    let secret = match secrets::secret(&fields, SecretKeys::SECRET, report) {
        AdminToken::None => Password::None,
        AdminToken::Literal(secret) => Password::Literal(secret),
        AdminToken::Env(name) => Password::Env(name),
    };
    if is_hashed == Some(false) || fields.get("keys").is_none() {
        if secret != Password::None {
            let message = "has no effect without `keys: hashed`; add that, or remove the secret";
            fields.wrong(report, written(&fields), message);
        }
        return KeyPrivacy::Plain;
    }
    if has_redis && secret == Password::None && !fields.tries("secret_env") {
        let message = "is missing; servers that share a Redis must hash keys with the same secret, so name the \
                       environment variable that contains the secret";
        fields.wrong(report, "secret_env", message);
    }
    KeyPrivacy::Hashed { secret }
}

fn read_hashed(keys: &Value<'_>, report: &mut Report) -> Option<bool> {
    keys.choice(report, &[("plain", false), ("hashed", true)])
}

/// Returns the name of the field in which the secret is written.
fn written(fields: &Fields<'_>) -> &'static str {
    match fields.get("secret") {
        Some(_) => "secret",
        None => "secret_env",
    }
}
