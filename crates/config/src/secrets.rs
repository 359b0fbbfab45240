//! Secrets: the tokens of the admin listener, and the keys that set a secret in other sections.

use std::fmt;

use super::{
    report::Report,
    value::{Fields, Value},
};

/// The maximum length of a token, in bytes.
const MAX_TOKEN_BYTES: usize = 4_096;

/// The token that clients of the admin listener must send.
#[derive(Clone, Default, PartialEq, Eq)]
pub enum AdminToken {
    /// No token is required, because the listener is on loopback.
    #[default]
    None,
    /// `admin.token`: the token itself.
    Literal(String),
    /// `admin.token_env`: the name of the environment variable that contains the token. The code
    /// that starts the server must read the variable, and must abort the start if the variable is
    /// not set.
    Env(String),
}

/// A named token of the admin listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperatorToken {
    /// `name`: the operator's name in the audit log.
    pub name: String,
    /// `scope`: the permissions of the token; default `read`.
    pub scope: TokenScope,
    /// `token` or `token_env`. Never [`AdminToken::None`].
    pub token: AdminToken,
}

/// The permissions of an admin listener token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TokenScope {
    /// The token permits only reading.
    #[default]
    Read,
    /// The token permits reading and every change.
    Operate,
}

impl TokenScope {
    /// Returns `read` or `operate`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Operate => "operate",
        }
    }
}

/// Hides the token, because `Debug` output can reach logs.
impl fmt::Debug for AdminToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("None"),
            Self::Literal(_) => f.write_str("Literal(…)"),
            Self::Env(name) => f.debug_tuple("Env").field(name).finish(),
        }
    }
}

/// The two keys that can set a secret.
#[derive(Clone, Copy)]
pub(super) struct SecretKeys {
    /// The key of the secret itself.
    pub(super) literal: &'static str,
    /// The key of the environment variable that contains the secret.
    pub(super) variable: &'static str,
}

impl SecretKeys {
    const TOKEN: Self = Self {
        literal: "token",
        variable: "token_env",
    };
    const PASSWORD: Self = Self {
        literal: "password",
        variable: "password_env",
    };
    pub(super) const SECRET: Self = Self {
        literal: "secret",
        variable: "secret_env",
    };

    /// Returns the keys that set the secret of a listener whose settings have these `keys`.
    pub(super) fn of_listener(keys: &[&'static str]) -> Self {
        if keys.contains(&"password") {
            Self::PASSWORD
        } else {
            Self::TOKEN
        }
    }
}

/// The maximum number of `admin.tokens`.
const MAX_TOKENS: usize = 100;

/// The names that the audit log uses for changes made without a token: by a local request, by a
/// signal, or by a change to the rules file.
const RESERVED_NAMES: [&str; 3] = ["local", "SIGHUP", "a file change"];

/// Reads the section `admin`: the token, and the named tokens.
pub(super) fn admin_tokens(
    file: &Fields<'_>,
    report: &mut Report,
) -> (AdminToken, Vec<OperatorToken>) {
    let value = file.get("admin");
    let known = &["token", "token_env", "tokens"];
    let what = "a map such as {token_env: TIDEGATE_ADMIN_TOKEN}";
    let Some(fields) = value.and_then(|value| value.fields(report, what, known)) else {
        return (AdminToken::None, Vec::new());
    };
    let unnamed = secret(&fields, SecretKeys::TOKEN, report);
    let mut named: Vec<OperatorToken> = Vec::new();
    if let Some(value) = fields.get("tokens") {
        let items = value.one_or_more(report);
        if items.len() > MAX_TOKENS {
            let message = format!("{} tokens exceed the maximum of {MAX_TOKENS}", items.len());
            value.wrong(report, message);
        }
        for item in &items {
            let Some(token) = operator_token(item, report) else {
                continue;
            };
            let fields = item.fields_among(&["name", "token", "token_env"]);
            if RESERVED_NAMES.contains(&&*token.name)
                && let Some(fields) = &fields
            {
                let message = "is reserved: the audit log uses it for changes made without a \
                               token; choose another name";
                fields.wrong(report, "name", message);
            }
            if token.name == "admin" || named.iter().any(|other| other.name == token.name) {
                let message = "is the name of another token; choose another name";
                if let Some(fields) = &fields {
                    fields.wrong(report, "name", message);
                }
            }
            let same = |other: &AdminToken| *other == token.token && *other != AdminToken::None;
            let has_twin = same(&unnamed) || named.iter().any(|other| same(&other.token));
            if has_twin && let Some(fields) = &fields {
                let field = match token.token {
                    AdminToken::Env(_) => "token_env",
                    AdminToken::Literal(_) | AdminToken::None => "token",
                };
                let message = "is also the secret of another token; give each token its own secret";
                fields.wrong(report, field, message);
            }
            named.push(token);
        }
    }
    (unnamed, named)
}

fn operator_token(value: &Value<'_>, report: &mut Report) -> Option<OperatorToken> {
    let what = "a map such as {name: alice, scope: operate, token_env: ALICE_TOKEN}";
    let known = &["name", "scope", "token", "token_env"];
    let fields = value.fields(report, what, known)?;
    let scope = fields.get("scope").and_then(|scope| {
        let choices = [("read", TokenScope::Read), ("operate", TokenScope::Operate)];
        scope.choice(report, &choices)
    });
    let token = secret(&fields, SecretKeys::TOKEN, report);
    if token == AdminToken::None && !fields.tries("token_env") {
        let message = "is missing; name the environment variable with the token";
        fields.wrong(report, "token_env", message);
    }
    let Some(name) = fields.get("name") else {
        let message = "is missing; give the name that the audit log shows";
        fields.wrong(report, "name", message);
        return None;
    };
    Some(OperatorToken {
        name: name.text(report, "a name such as alice")?.to_owned(),
        scope: scope.unwrap_or_default(),
        token,
    })
}

/// Reads a secret that either of two keys can set. Reports an error if both keys are set.
pub(super) fn secret(fields: &Fields<'_>, keys: SecretKeys, report: &mut Report) -> AdminToken {
    match (fields.get(keys.literal), fields.get(keys.variable)) {
        (Some(token), Some(env)) => {
            let message = format!("conflicts with `{}`; remove one of the two", keys.literal);
            env.wrong(report, message);
            literal(token, report)
        }
        (Some(token), None) => literal(token, report),
        (None, Some(env)) => variable(env, report),
        (None, None) => AdminToken::None,
    }
}

/// Reads a token from the file. Messages never contain the token. An invalid token is reported and
/// also returned, so that callers do not report the token as missing as well.
fn literal(value: &Value<'_>, report: &mut Report) -> AdminToken {
    let text = value.scalar().unwrap_or_default();
    let is_sound = (1..=MAX_TOKEN_BYTES).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_graphic());
    if !is_sound {
        let message =
            format!("must be 1 to {MAX_TOKEN_BYTES} printable ASCII characters without spaces");
        value.wrong(report, message);
    }
    AdminToken::Literal(text.to_owned())
}

fn variable(value: &Value<'_>, report: &mut Report) -> AdminToken {
    let what = "the name of an environment variable";
    let name = value.text(report, what).unwrap_or("?");
    let is_sound = !name.is_empty() && !name.contains(['=', '\0']);
    if !is_sound {
        value.expected(report, what);
    }
    AdminToken::Env(name.to_owned())
}
