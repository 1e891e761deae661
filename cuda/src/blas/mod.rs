//! Linear layers by cuBLASLt ([`Blas`]), if installed: shapes, the algorithm chosen for each, and calls.
//!
//! cuBLASLt is column-major. A row-major matrix `[rows][ld]` is a column-major one of `cols` by `rows` with the same
//! leading dimension, so `out = x · weightᵀ` becomes `outᵀ = weightᵀᵀ · xᵀ`: A is the weight, transposed (`k` by `n`
//! as stored), B is `x` (`k` by `rows`), D is `out` (`n` by `rows`). Sums are f32 for every type; f32 weights
//! multiply in f32, or in TF32 if the device was opened so.
//!
//! The choice for a shape is cached, since the heuristic takes longer than small products. The workspace is allocated
//! once, so calls allocate nothing and can be captured in a graph; it belongs to one stream.

mod library;
mod wheels;

pub use library::{CublasLt, ENVIRONMENT};

use crate::driver::{Buffer, Context, CudaError, Stream, released_by};
use lagoon_types::DType;
use library::{
    Algorithm, COMPUTE_32F, COMPUTE_32F_FAST_TF32, DESC_TRANSA, Descriptor, Handle, Heuristic, NOT_SUPPORTED,
    OPERATION_T, PREF_ALIGNMENT, PREF_WORKSPACE_BYTES, R_16BF, R_16F, R_32F, SUCCESS, Status,
};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// NVIDIA's recommendation for compute capability 9.0.
const WORKSPACE_BYTES: usize = 32 << 20;
/// Alignment of all addresses and rows passed to the library.
static ALIGNMENT_BYTES: u32 = 16;
/// Shapes that are cached; a full cache is cleared. Chunks of prompts have any number of rows.
const SHAPES_MAX: usize = 512;

/// A product's shape: `out[rows][n] (=|+=) x[rows][k] · weight[n][k]ᵀ` with row strides in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Shape {
    pub rows: u32,
    pub n: u32,
    pub k: u32,
    pub ldx: u32,
    pub ldw: u32,
    pub ldo: u32,
    /// Element type of the weight and of `x`; `out` is f32.
    pub dtype: DType,
}

/// A handle of the library, and its workspace on the device.
#[derive(Debug)]
struct Session {
    library: Arc<CublasLt>,
    context: Arc<Context>,
    handle: Handle,
    workspace: Buffer,
    /// Compute type of f32 products.
    f32_compute: c_int,
}

// SAFETY: NVIDIA documents handles as usable from any thread, one at a time for one workspace; the device has one thread.
unsafe impl Send for Session {}
// SAFETY: as above.
unsafe impl Sync for Session {}

impl Drop for Session {
    fn drop(&mut self) {
        if self.context.make_current().is_ok() {
            // SAFETY: created once, destroyed once; plans keep the session alive.
            released_by(unsafe { (self.library.destroy)(self.handle) });
        }
    }
}

/// A descriptor of any kind and the function that destroys it.
#[derive(Debug)]
struct Owned {
    at: Descriptor,
    destroy: unsafe extern "C" fn(*mut c_void) -> Status,
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once; the library lives, because the plan holds its session.
        released_by(unsafe { (self.destroy)(self.at) });
    }
}

/// The algorithm for a shape, and its descriptors.
#[derive(Debug)]
struct Plan {
    operation: Owned,
    weight: Owned,
    x: Owned,
    out: Owned,
    algorithm: Algorithm,
    workspace_bytes: usize,
    // Last field: dropped after the descriptors.
    session: Arc<Session>,
}

// SAFETY: descriptors are plain memory that is only read once made.
unsafe impl Send for Plan {}
// SAFETY: as above.
unsafe impl Sync for Plan {}

/// One product, to be run now or later.
#[derive(Clone, Debug)]
pub struct Call {
    plan: Arc<Plan>,
    x: u64,
    weight: u64,
    out: u64,
    add: bool,
}

impl PartialEq for Call {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.plan, &other.plan)
            && (self.x, self.weight, self.out, self.add) == (other.x, other.weight, other.out, other.add)
    }
}

/// cuBLASLt for one stream of a device.
#[derive(Debug)]
pub struct Blas {
    session: Arc<Session>,
    shapes: BTreeMap<Shape, Option<Arc<Plan>>>,
}

fn check(call: &'static str, status: Status) -> Result<(), CudaError> {
    if status == SUCCESS { Ok(()) } else { Err(CudaError::Library { call, status }) }
}

impl Blas {
    /// Opens the library for a device; with `tf32`, f32 products round their factors to TF32 (10 bits of mantissa).
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] if the driver is older than the library; those of the library; no memory for the
    /// workspace.
    pub fn new(library: Arc<CublasLt>, context: &Arc<Context>, tf32: bool) -> Result<Self, CudaError> {
        let driver = context.attributes().driver_version as usize / 1000;
        if library.major() > driver {
            let version = library.version();
            return Err(CudaError::Unsupported(format!("cuBLASLt {version} is newer than the driver's CUDA {driver}")));
        }
        context.make_current()?;
        let workspace = Buffer::new(context, "cuBLASLt's workspace", WORKSPACE_BYTES)?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the library fills the live handle; a context is current.
        check("cublasLtCreate", unsafe { (library.create)(&raw mut handle) })?;
        let f32_compute = if tf32 { COMPUTE_32F_FAST_TF32 } else { COMPUTE_32F };
        let session = Session { library, context: Arc::clone(context), handle, workspace, f32_compute };
        Ok(Self { session: Arc::new(session), shapes: BTreeMap::new() })
    }

    /// Name and version of the library, for people.
    #[must_use]
    pub fn name(&self) -> String {
        let tf32 = if self.session.f32_compute == COMPUTE_32F { "off" } else { "on" };
        let library = &self.session.library;
        format!("cuBLASLt {} ({}), TF32 {tf32}", library.version(), library.file().display())
    }

    /// A product of this shape; `None` if the library has no algorithm for it.
    ///
    /// # Errors
    /// Those of the library.
    pub fn call(&mut self, shape: Shape, x: u64, weight: u64, out: u64, add: bool) -> Result<Option<Call>, CudaError> {
        if !self.shapes.contains_key(&shape) {
            if self.shapes.len() == SHAPES_MAX {
                self.shapes.clear();
            }
            let plan = Plan::new(&self.session, shape)?;
            self.shapes.insert(shape, plan.map(Arc::new));
        }
        let plan = self.shapes.get(&shape).and_then(Clone::clone);
        Ok(plan.map(|plan| Call { plan, x, weight, out, add }))
    }
}

impl Plan {
    fn new(session: &Arc<Session>, shape: Shape) -> Result<Option<Self>, CudaError> {
        session.context.make_current()?;
        let library = &session.library;
        let (kind, compute) = match shape.dtype {
            DType::F32 => (R_32F, session.f32_compute),
            DType::F16 => (R_16F, COMPUTE_32F),
            DType::BF16 => (R_16BF, COMPUTE_32F),
        };
        let layout = |kind, rows: u32, cols: u32, ld: u32| -> Result<Owned, CudaError> {
            let mut at = std::ptr::null_mut();
            // SAFETY: the library fills the live pointer.
            let status =
                unsafe { (library.layout_create)(&raw mut at, kind, u64::from(rows), u64::from(cols), i64::from(ld)) };
            check("cublasLtMatrixLayoutCreate", status)?;
            Ok(Owned { at, destroy: library.layout_destroy })
        };
        let weight = layout(kind, shape.k, shape.n, shape.ldw)?;
        let x = layout(kind, shape.k, shape.rows, shape.ldx)?;
        let out = layout(R_32F, shape.n, shape.rows, shape.ldo)?;
        let mut at = std::ptr::null_mut();
        // SAFETY: the library fills the live pointer.
        check("cublasLtMatmulDescCreate", unsafe { (library.desc_create)(&raw mut at, compute, R_32F) })?;
        let operation = Owned { at, destroy: library.desc_destroy };
        let set = |what, value: &c_int| {
            // SAFETY: the attribute is an `int`, which is copied.
            let status =
                unsafe { (library.desc_set)(operation.at, what, std::ptr::from_ref(value).cast(), size_of::<c_int>()) };
            check("cublasLtMatmulDescSetAttribute", status)
        };
        set(DESC_TRANSA, &OPERATION_T)?;
        let Some(found) = choose(session, &operation, [&weight, &x, &out])? else { return Ok(None) };
        Ok(Some(Self {
            operation,
            weight,
            x,
            out,
            algorithm: found.algorithm,
            workspace_bytes: found.workspace_bytes,
            session: Arc::clone(session),
        }))
    }
}

/// The first choice of the library's heuristic within the workspace.
fn choose(session: &Session, operation: &Owned, layouts: [&Owned; 3]) -> Result<Option<Heuristic>, CudaError> {
    let library = &session.library;
    let mut at = std::ptr::null_mut();
    // SAFETY: the library fills the live pointer.
    check("cublasLtMatmulPreferenceCreate", unsafe { (library.pref_create)(&raw mut at) })?;
    let preference = Owned { at, destroy: library.pref_destroy };
    // SAFETY: the attribute is a 64-bit number, which is copied.
    let status = unsafe {
        (library.pref_set)(preference.at, PREF_WORKSPACE_BYTES, (&raw const WORKSPACE).cast(), size_of::<u64>())
    };
    check("cublasLtMatmulPreferenceSetAttribute", status)?;
    for what in PREF_ALIGNMENT {
        // SAFETY: the attribute is a 32-bit number, which is copied.
        let status =
            unsafe { (library.pref_set)(preference.at, what, (&raw const ALIGNMENT_BYTES).cast(), size_of::<u32>()) };
        check("cublasLtMatmulPreferenceSetAttribute", status)?;
    }
    let [weight, x, out] = layouts.map(|layout| layout.at);
    let (mut found, mut count) = (Heuristic::default(), 0);
    // SAFETY: all descriptors live; the library fills one result and their number.
    let status = unsafe {
        (library.heuristic)(
            session.handle,
            operation.at,
            weight,
            x,
            out,
            out,
            preference.at,
            1,
            &raw mut found,
            &raw mut count,
        )
    };
    // No algorithm for the shape: the one error that is an answer.
    if status == NOT_SUPPORTED || (status == SUCCESS && (count == 0 || found.state != SUCCESS)) {
        return Ok(None);
    }
    check("cublasLtMatmulAlgoGetHeuristic", status)?;
    Ok((found.workspace_bytes <= WORKSPACE_BYTES).then_some(found))
}

static WORKSPACE: u64 = WORKSPACE_BYTES as u64;

impl Call {
    /// Runs the product in `stream`.
    ///
    /// # Errors
    /// Those of the library.
    ///
    /// # Safety
    /// The addresses are those of matrices of the call's shape that stay valid until the stream has run the product,
    /// and no other stream uses this library's workspace.
    pub(crate) unsafe fn run(&self, stream: &Stream) -> Result<(), CudaError> {
        let Plan { operation, weight, x, out, algorithm, workspace_bytes, session } = &*self.plan;
        session.context.make_current()?;
        let (alpha, beta) = (1.0f32, if self.add { 1.0f32 } else { 0.0 });
        // SAFETY: the descriptors live; alpha and beta are read during the call; the rest is the caller's promise.
        let status = unsafe {
            (session.library.matmul)(
                session.handle,
                operation.at,
                (&raw const alpha).cast(),
                self.weight as *const c_void,
                weight.at,
                self.x as *const c_void,
                x.at,
                (&raw const beta).cast(),
                self.out as *const c_void,
                out.at,
                self.out as *mut c_void,
                out.at,
                algorithm,
                session.workspace.address() as *mut c_void,
                *workspace_bytes,
                stream.handle().cast(),
            )
        };
        check("cublasLtMatmul", status)
    }
}
