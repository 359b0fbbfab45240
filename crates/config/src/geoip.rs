//! `geoip`: the GeoIP databases.

use std::path::PathBuf;

use tidegate_identity::GeoIpField;

use super::{report::Report, value::Fields};

/// Reads the paths of the databases. Returns an empty list if the file has no section `geoip`.
pub(super) fn geoip(file: &Fields<'_>, report: &mut Report) -> Vec<(GeoIpField, PathBuf)> {
    let known = GeoIpField::ALL.map(GeoIpField::as_str);
    let what = "a map such as {country: GeoLite2-Country.mmdb}";
    let Some(value) = file.get("geoip") else {
        return Vec::new();
    };
    let Some(fields) = value.fields(report, what, &known) else {
        return Vec::new();
    };
    if !known.iter().any(|name| fields.tries(name)) {
        value.wrong(report, "names no database; set `country`, `asn` or both");
    }
    let database = |place: GeoIpField| {
        let path = fields.get(place.as_str())?;
        let what = "the path of a database in MaxMind's format";
        let named = path.text(report, what)?;
        Some((place, PathBuf::from(named)))
    };
    GeoIpField::ALL.into_iter().filter_map(database).collect()
}

#[cfg(test)]
mod tests {
    use crate::Config;

    #[test]
    fn every_mistake_is_reported_with_its_line() {
        let errors = |text: &str| {
            let mistakes = Config::parse(text).unwrap_err();
            mistakes.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let advice = "names no database; set `country`, `asn` or both";
        assert_eq!(errors("geoip: {}"), [format!("geoip (line 1): {advice}")]);
        let expected = [
            "geoip.city (line 2): unknown key `city`; expected one of country, asn",
            "geoip.asn (line 3): expected the path of a database in MaxMind's format, got a list",
        ];
        assert_eq!(
            errors("geoip:\n  city: a.mmdb\n  asn: [b.mmdb]\n"),
            expected
        );
    }
}
