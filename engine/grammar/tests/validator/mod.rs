//! JSON Schema's own judgement of what a grammar let through.

use boon::{Compiler, SchemaIndex, Schemas};
use serde_json::Value;

/// A compiled schema; formats are asserted.
pub(crate) struct Validator {
    schemas: Schemas,
    root: SchemaIndex,
}

impl Validator {
    pub(crate) fn of(schema: &Value) -> Self {
        let (mut schemas, mut compiler) = (Schemas::new(), Compiler::new());
        compiler.enable_format_assertions();
        compiler.add_resource("mem:///schema", schema.clone()).unwrap();
        let root = compiler.compile("mem:///schema", &mut schemas).unwrap_or_else(|error| panic!("{schema}: {error}"));
        Self { schemas, root }
    }

    /// # Errors
    /// What `value` lacks.
    pub(crate) fn validate(&self, value: &Value) -> Result<(), String> {
        self.schemas.validate(value, self.root).map_err(|error| error.to_string())
    }
}
