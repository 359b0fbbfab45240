//! A certificate authority for tests, and certificates that it signed.

use std::{
    path::PathBuf,
    process::{Command, Stdio},
};

use super::Scratch;

/// PEM files: `ca.pem`, and `server` and `client`, each with `.pem` and `.key`.
#[derive(Debug)]
pub struct Certificates(Scratch);

impl Certificates {
    /// Creates a certificate authority, and signs certificates for a server at 127.0.0.1 and for a
    /// client.
    pub fn make() -> Self {
        let made = Self(Scratch::new());
        made.openssl(&format!(
            "req -x509 {NEW_KEY} ca.key -out ca.pem -days 2 -subj /CN=authority"
        ));
        for name in ["server", "client"] {
            made.openssl(&format!(
                "req -x509 {NEW_KEY} {name}.key -out {name}.pem -days 2 -subj /CN={name} -CA ca.pem -CAkey ca.key \
                 -addext subjectAltName=IP:127.0.0.1 -addext basicConstraints=critical,CA:FALSE"
            ));
        }
        made
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).unwrap()
    }

    fn openssl(&self, arguments: &str) {
        let done = Command::new("openssl")
            .args(arguments.split_whitespace())
            .current_dir(self.0.path())
            .stdin(Stdio::null())
            .output()
            .unwrap_or_else(|error| panic!("cannot start openssl: {error}; run scripts/setup"));
        assert!(
            done.status.success(),
            "{}",
            String::from_utf8_lossy(&done.stderr)
        );
    }
}

const NEW_KEY: &str = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout";
