//! Tests that `schema.json` matches the types of [`crate::result`], including their documentation.

use schemars::generate::SchemaSettings;
use schemars::transform::{Transform, transform_subschemas};
use serde_json::Value;

use crate::result::Results;

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/schema.json");

/// Forbids properties that the types do not have.
#[derive(Clone)]
struct Strict;

impl Transform for Strict {
    fn transform(&mut self, schema: &mut schemars::Schema) {
        transform_subschemas(self, schema);
        if schema.get("properties").is_some() {
            schema.insert("additionalProperties".to_owned(), Value::Bool(false));
        }
    }
}

fn generated() -> String {
    let settings = SchemaSettings::draft2020_12().for_serialize().with_transform(Strict);
    let mut schema = settings.into_generator().into_root_schema_for::<Results>();
    schema.insert("title".to_owned(), "Results of blkq bench".into());
    serde_json::to_string_pretty(&schema).unwrap() + "\n"
}

#[test]
fn the_schema_matches_the_result_types() {
    let generated = generated();
    if std::env::var_os("BLKQ_WRITE_SCHEMA").is_some() {
        std::fs::write(FILE, &generated).unwrap();
    }
    let committed = std::fs::read_to_string(FILE).unwrap_or_default();
    assert!(
        committed == generated,
        "schema.json does not match the result types; update it with \
         BLKQ_WRITE_SCHEMA=1 cargo test -p blkq-bench schema"
    );
}

#[test]
fn results_do_not_change_from_json_to_types_and_back() {
    let json: Value = serde_json::from_str(include_str!("../tests/hostile.json")).unwrap();
    let results: Results = serde_json::from_value(json.clone()).unwrap();
    assert_eq!(serde_json::to_value(&results).unwrap(), json);
}
