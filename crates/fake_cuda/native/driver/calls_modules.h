// Modules and launches.
#pragma once
#include "launch.h"

API int cuModuleLoadData(Module **module, const void *image) {
    return not_in_capture("cuModuleLoadData", [&] {
        std::istringstream text((const char *)image);
        std::string magic, file, element, architecture;
        text >> magic >> file >> element >> architecture;
        if (magic != "fake-cubin") return INVALID_IMAGE;
        // Text is compiled for this GPU, if it is for one that is no newer.
        if (architecture != "sm_90" && architecture != "compute_80") return NO_BINARY_FOR_GPU;
        std::string folder;
        std::getline(std::ifstream(own_folder() + "/modules") >> std::ws, folder);
        void *library = dlopen((folder + "/" + file + "-" + element + ".so").c_str(), RTLD_NOW | RTLD_LOCAL);
        if (!library) return FILE_NOT_FOUND;
        *module = new Module{current->index, nullptr, nullptr};
        (*module)->signature = (const char *(*)(const char *))dlsym(library, "module_signature");
        (*module)->run = (const char *(*)(const char *, unsigned, unsigned, void *const *, int))dlsym(library, "module_run");
        fake.modules.insert(*module);
        return SUCCESS;
    });
}

API int cuModuleUnload(Module *module) {
    return not_in_capture("cuModuleUnload", [&] {
        if (!fake.modules.erase(module)) return INVALID_HANDLE;
        for (auto function = fake.functions.begin(); function != fake.functions.end();) {
            const bool is_its = (*function)->module == module;
            if (is_its) delete *function;
            function = is_its ? fake.functions.erase(function) : std::next(function);
        }
        // The thing itself stays: a launch that comes too late finds out by its address.
        return SUCCESS;
    });
}

API int cuModuleGetFunction(Function **function, Module *module, const char *name) {
    return not_in_capture("cuModuleGetFunction", [&] {
        if (!fake.modules.count(module)) return INVALID_HANDLE;
        const char *letters = module->signature(name);
        if (!letters) return NOT_FOUND;
        *function = new Function{module, name, letters, sizes_of(letters)};
        fake.functions.insert(*function);
        return SUCCESS;
    });
}

API int cuLaunchKernel(Function *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                       Stream *stream, void **parameters, void **extra) {
    return on_stream("cuLaunchKernel", stream, [&] {
        if (!fake.functions.count(function) || function->module->device != stream->device) return (int)INVALID_HANDLE;
        const bool one_dimension = gy == 1 && gz == 1 && by == 1 && bz == 1 && !shared && !extra;
        if (!one_dimension || !gx || !bx || bx > 1024) return (int)INVALID_VALUE;
        auto launch = std::make_shared<Launch>(Launch{current, *function, gx, bx, {}});
        for (std::size_t i = 0; i < function->sizes.size(); i++) {
            const char *from = (const char *)parameters[i];
            launch->arguments.emplace_back(from, from + function->sizes[i]);
        }
        stream->computes = true;
        fake.journal.write("launch " + function->name);
        return put(stream, [launch] { launch->run(); });
    });
}
