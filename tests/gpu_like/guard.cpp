// What torch asks of a device's C++ side before anything is computed: two CUDA devices, each on one stream, that is
// always done. Python is told of one (stand_ins.py). The CPU build of torch has no CUDA library to register these, so they are free to take. They have to be there
// before `import torch` looks for them (gpu_like/device.py loads this file first).
//
// Does not compute: that is Python's part.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10 {
namespace {

thread_local DeviceIndex current = 0;

Stream stream_of(Device device) {
  return Stream(Stream::DEFAULT, Device(DeviceType::CUDA, device.has_index() ? device.index() : current));
}

struct TwoDevices : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  DeviceIndex deviceCount() const noexcept override { return 2; }
  Device getDevice() const override { return Device(DeviceType::CUDA, current); }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    current = device.index();
    return before;
  }
  void setDevice(Device device) const override { current = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  Stream getStream(Device device) const noexcept override { return stream_of(device); }
  Stream getDefaultStream(Device device) const override { return stream_of(device); }
  Stream getNewStream(Device device, int) const override { return stream_of(device); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream_of(stream.device()); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, TwoDevices);

} // namespace
} // namespace c10

namespace at {

struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 2; }
  DeviceIndex getCurrentDevice() const override { return c10::current; }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};
REGISTER_CUDA_HOOKS(CUDAHooks);

} // namespace at
