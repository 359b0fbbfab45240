//! Reads the secrets in the environment variables that the command line and the rules file name.
//!
//! To keep a secret out of the environment, a service manager or an orchestrator can pass the
//! secret in a file. systemd (`LoadCredential=`) provides the file in a credentials folder. For
//! containers, the variable with the suffix `_FILE` is set to the file's path.

use std::{
    fs::File,
    io::{self, Read as _},
    path::{Path, PathBuf},
};

/// The maximum size of a file that contains a secret, in bytes.
const MAX_SECRET_BYTES: u64 = 64 << 10;

/// The variable that systemd sets to the path of this process's credentials folder.
const CREDENTIALS_DIRECTORY: &str = "CREDENTIALS_DIRECTORY";

/// Returns the secret `name`. The secret comes from the environment variable `name`, from the file
/// whose path is in the variable `{name}_FILE`, or from the file `name` in the credentials folder.
/// `field` is the setting that names the secret, and `what` describes the secret.
///
/// # Errors
///
/// Fails if the secret is in none of these places, or if its file cannot be used.
pub(crate) fn read(field: &str, name: &str, what: &str) -> Result<String, String> {
    find(field, name, what, variable)
}

fn find(
    field: &str,
    name: &str,
    what: &str,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<String, String> {
    if let Some(secret) = variable(name) {
        return Ok(secret);
    }
    let file_variable = format!("{name}_FILE");
    if let Some(path) = variable(&file_variable) {
        return read_file(Path::new(&path))
            .map_err(|problem| format!("{field}: {file_variable}: {path}: {problem}"));
    }
    // A name such as `../x` must not lead to a file outside the credentials folder.
    let credential = variable(CREDENTIALS_DIRECTORY)
        .filter(|_| !name.contains('/') && name != "..")
        .map(|folder| PathBuf::from(folder).join(name));
    if let Some(path) = credential.filter(|path| path.exists()) {
        return read_file(&path)
            .map_err(|problem| format!("{field}: the credential {}: {problem}", path.display()));
    }
    Err(format!(
        "{field}: the environment variable {name} is not set; set it to {what}, or {file_variable} to the path of a file with it"
    ))
}

/// Reads a secret from a file. A line break at the end of the file is not part of the secret.
fn read_file(path: &Path) -> Result<String, String> {
    let unreadable =
        |error: io::Error| format!("cannot read it: {error}; fix the path or its permissions");
    let mut secret = String::new();
    File::open(path)
        .and_then(|file| file.take(MAX_SECRET_BYTES + 1).read_to_string(&mut secret))
        .map_err(unreadable)?;
    if u64::try_from(secret.len()).unwrap_or(u64::MAX) > MAX_SECRET_BYTES {
        return Err(format!(
            "is larger than {MAX_SECRET_BYTES} bytes; it must contain only the secret"
        ));
    }
    let secret = secret.trim_end_matches(['\r', '\n']);
    if secret.is_empty() {
        return Err("is empty; write the secret to it".to_owned());
    }
    Ok(secret.to_owned())
}

/// Returns the value of an environment variable; `None` if it is empty.
#[expect(
    clippy::disallowed_methods,
    reason = "secrets are read from environment variables here"
)]
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// A temporary folder for a test, removed when the test ends.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("tidegate-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn write(&self, name: &str, content: impl AsRef<[u8]>) -> String {
            let path = self.0.join(name);
            fs::write(&path, content).unwrap();
            path.display().to_string()
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            drop(fs::remove_dir_all(&self.0));
        }
    }

    fn found(variables: &[(&str, &str)]) -> Result<String, String> {
        find("admin.token_env", "TOKEN", "the admin token", |name| {
            let variable = variables.iter().find(|(known, _)| *known == name);
            variable.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn a_secret_is_a_variable_or_a_file() {
        let folder = Folder::new("credential");
        let file = folder.write("other", "from the file\r\n");
        folder.write("TOKEN", "from systemd\n");
        let directory = folder.0.display().to_string();
        let credentials = ("CREDENTIALS_DIRECTORY", directory.as_str());
        let named = ("TOKEN_FILE", file.as_str());
        let set = ("TOKEN", "from the variable");
        assert_eq!(
            found(&[credentials, named, set]).unwrap(),
            "from the variable"
        );
        assert_eq!(found(&[credentials, named]).unwrap(), "from the file");
        assert_eq!(found(&[credentials]).unwrap(), "from systemd");
    }

    #[test]
    fn an_error_names_the_setting_and_the_file() {
        let folder = Folder::new("credential-errors");
        let large = usize::try_from(MAX_SECRET_BYTES).unwrap() + 1;
        for (file, expected) in [
            (
                folder.write("empty", "\n"),
                "is empty; write the secret to it",
            ),
            (
                folder.write("large", vec![b'a'; large]),
                "is larger than 65536 bytes",
            ),
            (folder.write("binary", [0xff, 0xfe]), "cannot read it"),
            ("/missing/token".to_owned(), "cannot read it: No such file"),
        ] {
            let error = found(&[("TOKEN_FILE", &file)]).unwrap_err();
            assert!(
                error.starts_with("admin.token_env: TOKEN_FILE: "),
                "{error}"
            );
            assert!(error.contains(expected), "{error}");
        }
        let missing = found(&[("CREDENTIALS_DIRECTORY", "/missing")]).unwrap_err();
        assert!(
            missing.contains("the environment variable TOKEN is not set"),
            "{missing}"
        );
        assert!(missing.contains("or TOKEN_FILE to the path"), "{missing}");
    }
}
