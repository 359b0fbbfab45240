//! Creates certificates with openssl.

use std::{path::Path, process::Command};

use super::{run, tool};

/// Runs openssl in `directory`.
fn openssl(directory: &Path, args: &str) {
    let args = args.split_whitespace();
    let output = run(Command::new(tool("openssl"))
        .args(args)
        .current_dir(directory));
    assert!(output.status.success(), "{output:?}");
}

const NEW_KEY: &str = "req -x509 -nodes -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -days 2";

/// Creates a certificate authority in the files NAME.pem and NAME.key.
pub(crate) fn authority(directory: &Path, name: &str) {
    let files = format!("-subj /CN={name} -keyout {name}.key -out {name}.pem");
    openssl(directory, &format!("{NEW_KEY} {files}"));
}

/// Creates a certificate for this machine, signed by `authority`, in the files NAME.pem and
/// NAME.key.
pub(crate) fn signed(directory: &Path, authority: &str, name: &str) {
    let signs = format!("-CA {authority}.pem -CAkey {authority}.key");
    let files = format!("-subj /CN={name} -keyout {name}.key -out {name}.pem");
    let names = "-addext subjectAltName=DNS:localhost,IP:127.0.0.1";
    let is_leaf = "-addext basicConstraints=CA:FALSE";
    openssl(
        directory,
        &format!("{NEW_KEY} {signs} {files} {names} {is_leaf}"),
    );
}
