// Runs a model that contains operators of opsmith, without Python.
//
//   serve FOLDER
//
// The folder holds what export.py writes. The program loads the operators' kernels, then the model, and compares its
// scores with PyTorch's.
#include <dlfcn.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

std::vector<char> content(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

int run(const std::string& folder) {
  // The operators must be known before the model is loaded, which looks them up by their names.
  if (dlopen((folder + "/liboperators.so").c_str(), RTLD_NOW) == nullptr) {
    std::cerr << dlerror() << "\n";
    return 1;
  }
  const c10::InferenceMode inference;
  torch::inductor::AOTIModelPackageLoader model(folder + "/model.pt2");

  const auto file = torch::jit::pickle_load(content(folder + "/case.pt"));
  const auto tensors = file.toList();
  const at::Tensor images = tensors.get(0).toTensor(), expected = tensors.get(1).toTensor();

  std::vector<at::Tensor> inputs = {images};
  const at::Tensor scores = model.run(inputs)[0];
  for (int64_t row = 0; row < scores.size(0); row++) {
    const auto here = scores[row].argmax().item<int64_t>(), there = expected[row].argmax().item<int64_t>();
    std::cout << "image " << row << ": class " << here << " with " << scores[row][here].item<float>()
              << "; PyTorch: class " << there << " with " << expected[row][there].item<float>() << "\n";
  }
  const float difference = (scores - expected).abs().max().item<float>();
  std::cout << "largest difference: " << difference << "\n";
  return difference < 1e-5 ? 0 : 1;
}

int main(int count, char** given) {
  try {
    return run(count > 1 ? given[1] : ".");
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
