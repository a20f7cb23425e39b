/* Import tables (GOT): replaces a function that one of UCX's libraries calls, where UCX has no hook. */
#define _GNU_SOURCE
#include <elf.h>
#include <link.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "native.h"

#if defined(__x86_64__)
#define IS_IMPORT(type) ((type) == R_X86_64_JUMP_SLOT || (type) == R_X86_64_GLOB_DAT)
#elif defined(__aarch64__)
#define IS_IMPORT(type) ((type) == R_AARCH64_JUMP_SLOT || (type) == R_AARCH64_GLOB_DAT)
#else
#define IS_IMPORT(type) false
#endif

/* Replaces an entry of an import table. Returns false if the system does not let it be written. */
static bool replace(void **entry, const void *function)
{
    uintptr_t page_size = (uintptr_t)sysconf(_SC_PAGESIZE);
    void *page          = (void *)((uintptr_t)entry & ~(page_size - 1));

    /* The linker may have made the table read-only (RELRO). It stays writable, as most import tables are. */
    if (mprotect(page, page_size, PROT_READ | PROT_WRITE) < 0) {
        return false;
    }
    __atomic_store_n(entry, (void *)(uintptr_t)function, __ATOMIC_RELEASE);
    return true;
}

typedef struct imports {
    const void *inside; /* something in the library */
    const char *name;
    const void *function;
    unsigned found, replaced; /* entries */
    ElfW(Addr) base;
    const ElfW(Sym) *symbols;
    const char *strings;
} imports_t;

static void replace_imports(imports_t *imports, ElfW(Addr) table, size_t size)
{
    const ElfW(Rela) *entry = (const ElfW(Rela) *)table;

    for (size_t i = 0; i < size / sizeof(*entry); i++) {
        if (IS_IMPORT(ELF64_R_TYPE(entry[i].r_info)) &&
            strcmp(imports->strings + imports->symbols[ELF64_R_SYM(entry[i].r_info)].st_name, imports->name) == 0) {
            imports->found++;
            imports->replaced += replace((void **)(imports->base + entry[i].r_offset), imports->function);
        }
    }
}

static const ElfW(Phdr) *segment(struct dl_phdr_info *object, ElfW(Word) type, ElfW(Addr) address)
{
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *header = &object->dlpi_phdr[i];
        ElfW(Addr) begin         = object->dlpi_addr + header->p_vaddr;

        if (header->p_type == type && (address == 0 || (begin <= address && address < begin + header->p_memsz))) {
            return header;
        }
    }
    return NULL;
}

static int visit(struct dl_phdr_info *object, size_t size, void *arg)
{
    imports_t *imports          = arg;
    ElfW(Addr) tables[2]        = {0, 0};
    size_t sizes[2]             = {0, 0};
    const ElfW(Phdr) *dynamic   = segment(object, PT_DYNAMIC, 0);
    const ElfW(Dyn) *tag;

    (void)size;
    if (dynamic == NULL || segment(object, PT_LOAD, (ElfW(Addr))(uintptr_t)imports->inside) == NULL) {
        return 0;
    }
    imports->base = object->dlpi_addr;
    for (tag = (const ElfW(Dyn) *)(imports->base + dynamic->p_vaddr); tag->d_tag != DT_NULL; tag++) {
        switch (tag->d_tag) {
        case DT_SYMTAB: imports->symbols = (const ElfW(Sym) *)tag->d_un.d_ptr; break;
        case DT_STRTAB: imports->strings = (const char *)tag->d_un.d_ptr; break;
        case DT_JMPREL: tables[0] = tag->d_un.d_ptr; break;
        case DT_PLTRELSZ: sizes[0] = tag->d_un.d_val; break;
        case DT_RELA: tables[1] = tag->d_un.d_ptr; break;
        case DT_RELASZ: sizes[1] = tag->d_un.d_val; break;
        default: break;
        }
    }
    /* The C library has made the addresses absolute; where one does not, this would read elsewhere. */
    if ((ElfW(Addr))(uintptr_t)imports->symbols >= imports->base && (ElfW(Addr))(uintptr_t)imports->strings >= imports->base) {
        for (int i = 0; i < 2; i++) {
            if (tables[i] >= imports->base) {
                replace_imports(imports, tables[i], sizes[i]);
            }
        }
    }
    return 1;
}

/* Lets the library that contains `inside` call `function` wherever it calls the function of this name in another object
 * file. Returns false if it has no such import, or if the system does not let it be replaced. */
bool tu_replace_import(const void *inside, const char *name, const void *function)
{
    imports_t imports = {.inside = inside, .name = name, .function = function};

    dl_iterate_phdr(visit, &imports);
    return imports.found > 0 && imports.replaced == imports.found;
}

const char *tu_replace_imports(const void *inside, const tu_import_t *imports, size_t count)
{
    const char *missing = NULL;

    for (size_t i = 0; i < count; i++) {
        if (!tu_replace_import(inside, imports[i].name, imports[i].function)) {
            missing = imports[i].name;
        }
    }
    return missing;
}
